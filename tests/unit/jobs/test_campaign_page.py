"""Layout of the graph of a campaign."""

from pathlib import Path

from hlat.jobs.campaign_page import GraphNode, build_layout, reduce_edges, write_campaign_page

NODES = [
    GraphNode("train", "train", "finished", "to step 3", ()),
    GraphNode("scores", "evaluate", "running", "1 of 2 jobs finished", ("train",)),
    GraphNode("mean", "average", "failed", "<b>", ("train",)),
    GraphNode("report", "report", "waiting", "", ("train", "scores", "mean")),
]


def test_implied_edges_are_omitted() -> None:
    assert reduce_edges({node.name: node.after for node in NODES}) == {
        "train": [],
        "scores": ["train"],
        "mean": ["train"],
        "report": ["scores", "mean"],
    }


def test_boxes_do_not_overlap_and_are_within_the_drawing() -> None:
    layout = build_layout(NODES)
    corners = {(box.x, box.y) for box in layout.boxes}
    assert len(corners) == len(NODES)
    assert len(layout.edges) == 4
    for box in layout.boxes:
        assert box.x + box.width < layout.width
        assert box.y + box.height < layout.height


def test_the_page_names_every_state_and_escapes_text(tmp_path: Path) -> None:
    rows = [(node.name, node.state, "", "", "", "", node.detail) for node in NODES]
    text = write_campaign_page(tmp_path, NODES, rows, ["train"], ["Table II"]).read_text()
    assert "report: waiting, after train and scores and mean" in text
    assert "<b>" not in text
    assert 'href="train/report.html"' in text
    assert "Table II" in text
