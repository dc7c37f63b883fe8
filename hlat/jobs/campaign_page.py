"""Page of a campaign: the graph of its stages with their states, jobs, scores and runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from hlat.figures.page_templates import render_page
from hlat.storage.durable_files import replace_file

PAGE_NAME = "campaign.html"
_TEMPLATE = Path(__file__).with_name("templates") / "campaign.html.j2"
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 184, 58, 40, 22, 8
"""Sizes of the graph in CSS pixels."""


@dataclass(frozen=True)
class GraphNode:
    """A stage in the graph.

    `state` is one of the words of the terminal's table, `detail` a short line, and `after` the
    names of the stages that must finish first.
    """

    name: str
    kind: str
    state: str
    detail: str
    after: tuple[str, ...]


@dataclass(frozen=True)
class PlacedNode:
    """A node with the position of its upper left corner."""

    node: GraphNode
    x: int
    y: int
    width: int = _BOX_WIDTH
    height: int = _BOX_HEIGHT


@dataclass(frozen=True)
class GraphLayout:
    """Boxes and edges of a graph; an edge is the `d` attribute of an SVG path."""

    boxes: tuple[PlacedNode, ...]
    edges: tuple[str, ...]
    width: int
    height: int
    alt_text: str


def build_layout(nodes: Sequence[GraphNode]) -> GraphLayout:
    """Return the layout of nodes in topological order: one column per depth, left to right."""
    edges = reduce_edges({node.name: node.after for node in nodes})
    depths: dict[str, int] = {}
    for node in nodes:
        depths[node.name] = max((depths[name] + 1 for name in node.after), default=0)
    rows = _assign_rows(edges, depths)
    boxes = {
        node.name: PlacedNode(
            node,
            _MARGIN + depths[node.name] * (_BOX_WIDTH + _GAP_X),
            _MARGIN + rows[node.name] * (_BOX_HEIGHT + _GAP_Y),
        )
        for node in nodes
    }
    paths = [
        _build_edge(boxes[source], boxes[name]) for name, after in edges.items() for source in after
    ]
    text = "; ".join(
        f"{node.name}: {node.state}" + (f", after {' and '.join(node.after)}" if node.after else "")
        for node in nodes
    )
    return GraphLayout(
        tuple(boxes.values()),
        tuple(paths),
        max((box.x + box.width for box in boxes.values()), default=0) + _MARGIN,
        max((box.y + box.height for box in boxes.values()), default=0) + _MARGIN,
        f"Graph of stages. {text}.",
    )


def _assign_rows(edges: Mapping[str, Sequence[str]], depths: Mapping[str, int]) -> dict[str, int]:
    """Return the row of each node; the row of an edge contains no other box until its target."""
    used: set[tuple[int, int]] = set()
    rows: dict[str, int] = {}
    for name in edges:
        ends = [depths[target] for target, sources in edges.items() if name in sources]
        columns = range(depths[name], max([depths[name] + 1, *ends]))
        rows[name] = next(r for r in count() if not any((column, r) in used for column in columns))
        used.update((column, rows[name]) for column in columns)
    return rows


def reduce_edges(after: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the direct predecessors without those that another predecessor implies."""
    ancestors: dict[str, set[str]] = {}
    for name, sources in after.items():
        ancestors[name] = set(sources).union(*(ancestors[source] for source in sources))
    return {
        name: [s for s in sources if not any(s in ancestors[other] for other in sources)]
        for name, sources in after.items()
    }


def write_campaign_page(
    campaign_dir: Path,
    nodes: Sequence[GraphNode],
    job_rows: Sequence[Sequence[str]],
    runs: Sequence[str],
    scores: Sequence[str],
) -> Path:
    """Write the page of a campaign, and return its path.

    Args:
        campaign_dir: Directory of the campaign.
        nodes: Stages in topological order.
        job_rows: Name, state, job id, predecessors, start, end and detail of each job.
        runs: Names of the run directories with a report.
        scores: Lines of the paper's tables with the scores of the campaign; may be empty.
    """
    headings = ("Job", "State", "Scheduler", "After", "Started (UTC)", "Ended (UTC)", "Detail")
    styles = {"Job": "row name", "State": "event"}
    content = render_page(
        _TEMPLATE,
        title="Campaign",
        name=campaign_dir.name,
        graph=build_layout(nodes),
        columns=[(heading, styles.get(heading, "")) for heading in headings],
        rows=job_rows,
        runs=runs,
        has_comparison=(campaign_dir / "comparison.html").exists(),
        scores="\n".join(scores),
    )
    page = campaign_dir / PAGE_NAME
    replace_file(page, content.encode())
    return page


def _build_edge(source: PlacedNode, target: PlacedNode) -> str:
    """Return a curve from the right side of a box to the left side of another one."""
    x1, y1 = source.x + source.width, source.y + source.height // 2
    x2, y2 = target.x, target.y + target.height // 2
    middle = x2 - _GAP_X // 2
    return f"M{x1} {y1}H{x2 - _GAP_X}C{middle} {y1} {middle} {y2} {x2 - 5} {y2}"
