"""The report as one HTML page: no network, legible on a phone, in the dark and aloud.

A page that needs nothing but itself can be mailed, archived beside its run, and opened in ten
years, also where scripts are off. Every text that comes from a file is escaped, because a run's
name is typed by people.
"""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from hlat.config.errors import ConfigError
from hlat.reporting import bars, expectation, interactive, lifetime, summary
from hlat.reporting.figures import PALETTE, Panel, legend
from hlat.reporting.record import Record
from hlat.reporting.wording import anything

_CSS = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1.5rem clamp(0.9rem, 3vw, 2.5rem) 4rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; margin: 0 0 1.5rem;
  overflow-wrap: anywhere; }
h1 small { display: block; font-size: 0.9rem; font-weight: 400; color: var(--muted); }
h2 { font-size: 1.2rem; margin: 2.5rem 0 0.75rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.92rem; }
caption { text-align: left; color: var(--muted); padding-bottom: 0.4rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 1.2rem 0.3rem 0;
  border-bottom: 1px solid var(--grid); }
th { font-weight: 500; }
thead th { color: var(--muted); }
tbody th { font-weight: 400; }
td.number, th.number { text-align: right; }
td { overflow-wrap: anywhere; }
td.number, td.time, td.event, th.name { white-space: nowrap; }
.wide { overflow: auto; max-height: 30rem; }
.wide table.long { min-width: 44rem; }
.side-by-side { display: flex; flex-wrap: wrap; gap: 1.5rem 4rem; align-items: flex-start; }
.side-by-side > * { max-width: 100%; }
.figures { display: grid; gap: 1.8rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure h3 { font-size: 1rem; font-weight: 600; margin: 0 0 0.3rem; }
figure svg { display: block; width: 100%; height: auto; max-width: 44rem; }
figcaption { font-size: 0.85rem; color: var(--muted); }
details { margin: 0.5rem 0; }
summary { cursor: pointer; }
pre { overflow: auto; max-height: 40rem; padding: 0.8rem; margin: 0.5rem 0;
  border: 1px solid var(--grid); border-radius: 4px; font-size: 0.82rem; line-height: 1.45; }
:focus-visible { outline: 2px solid var(--series-1); outline-offset: 2px; }
"""


def page(
    record: Record,
    drawings: Sequence[tuple[Panel, str]],
    time: str,
    others: Sequence[tuple[str, str, str]] = (),
    plan: str = "",
) -> str:
    """The whole report as an HTML document.

    Args:
        record: The run.
        drawings: Its curves, each with its SVG element.
        time: The SVG element of where its time went; empty if no attempt is recorded.
        others: Title, SVG element and caption of figures that are no curves.
        plan: The SVG element of what was planned; empty if nothing can be.
    """
    sections = [
        _numbers(record),
        _figures(record, drawings, others),
        _time(record, time),
        _plan(record, plan),
        _ledger(record),
        _events(record),
        _origin(record),
    ]
    return document("Run report", record.name, "".join(sections))


def document(kind: str, name: str, body: str) -> str:
    """An HTML document of a kind, about what has a name, that needs nothing but itself."""
    name = escape(name)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{interactive.POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name} - {kind.lower()}</title>\n"
        f"<style>{PALETTE}{_CSS}{interactive.CSS}</style>\n</head>\n"
        f"<body>\n<h1><small>{kind}</small>{name}</h1>\n<main>\n{body}</main>\n"
        f"<script>{interactive.SCRIPT}</script>\n</body>\n</html>\n"
    )


def _numbers(record: Record) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(value)}</td></tr>\n'
        for label, value in summary.summary(record)
    )
    table = f"<table>\n<caption>The run in numbers</caption>\n<tbody>\n{rows}</tbody>\n</table>\n"
    return f'<div class="side-by-side">\n{table}{_heldout(record)}</div>\n'


def _heldout(record: Record) -> str:
    steps = list(record.evaluations)
    if not steps:
        return "<p>No evaluation on held-out text is recorded.</p>\n"
    body = "".join(
        f'<tr><th scope="row">{escape(source)}</th>'
        + "".join(f'<td class="number">{escape(value)}</td>' for value in values)
        + "</tr>\n"
        for source, *values in summary.heldout(record)
    )
    moments = f'<th scope="col" class="number">step {steps[0]}</th>' + (
        f'<th scope="col" class="number">step {steps[-1]}</th>'
    )
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Held-out text">\n<table>\n'
        "<caption>Held-out text, first and last evaluation</caption>\n<thead>\n"
        '<tr><th scope="col" rowspan="2">Source</th>'
        '<th scope="colgroup" colspan="2">Loss (nats per token)</th>'
        '<th scope="colgroup" colspan="2">Bits per byte</th></tr>\n'
        f"<tr>{moments}{moments}</tr>\n</thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def _figures(
    record: Record,
    drawings: Sequence[tuple[Panel, str]],
    others: Sequence[tuple[str, str, str]],
) -> str:
    drawn = [interactive.figure(panel, svg, record) for panel, svg in drawings]
    drawn += [still(*other) for other in others]
    if not drawn:
        return "<h2>Figures</h2>\n<p>No step was logged, so there is nothing to draw.</p>\n"
    note = f"<p>{escape(legend(record))}</p>\n" if legend(record) else ""
    return figures(f'{note}<div class="figures">\n{"".join(drawn)}</div>\n')


def figures(drawn: str) -> str:
    """The section of figures that answer."""
    return f"<h2>Figures</h2>\n{interactive.CONTROLS}{drawn}"


def still(title: str, svg: str, caption: str) -> str:
    """A figure that is no curve."""
    return (
        f"<figure>\n<h3>{escape(title)}</h3>\n{svg}"
        f"<figcaption>{escape(caption)}</figcaption>\n</figure>\n"
    )


def _time(record: Record, drawing: str) -> str:
    ledger = record.lifetime
    if not ledger.attempts:
        return ""
    body = "".join(
        f'<tr><th scope="row">{name}</th><td class="number">{time}</td>'
        f'<td class="number">{share}</td><td>{meaning}</td></tr>\n'
        for name, time, share, meaning in lifetime.table(ledger)
    )
    note = f"{bars.caption(ledger)} {lifetime.note(ledger)}".strip()
    return (
        f"<h2>Where the time went</h2>\n<figure>\n{drawing}"
        f"<figcaption>{note}</figcaption>\n</figure>\n"
        '<div class="wide" tabindex="0" role="region" aria-label="Where the time went">\n<table>\n'
        "<caption>From the start of the first attempt to the last sign of life</caption>\n<thead>\n"
        '<tr><th scope="col">Kind</th><th scope="col" class="number">Time</th>'
        '<th scope="col" class="number">Share</th><th scope="col">What it is</th></tr>\n</thead>\n'
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n{_attempts(record)}"
    )


def _attempts(record: Record) -> str:
    if len(record.lifetime.attempts) < 2:
        return ""
    names = ("Attempt", "Began (UTC)", "Wall time", *lifetime.LABELS.values())
    heads = "".join(f'<th scope="col" class="number">{name}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row" class="number">{number}</th>'
        + "".join(f'<td class="number">{value}</td>' for value in values)
        + "</tr>\n"
        for number, *values in lifetime.attempts(record.lifetime)
    )
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Attempts">\n<table>\n'
        "<caption>Attempt by attempt; down is what followed it</caption>\n"
        f"<thead>\n<tr>{heads}</tr>\n</thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def _plan(record: Record, drawing: str) -> str:
    if not record.config or not record.metrics:
        return ""
    heading = f"<h2>{expectation.TITLE}</h2>\n"
    try:
        found = expectation.parts(record)
    except ConfigError as error:
        return f"{heading}<p>Nothing is planned: {escape('; '.join(error.problems))}.</p>\n"
    body = "".join(
        f'<tr><td>{escape(what)}</td><th scope="row">{escape(part)}</th>'
        + "".join(f'<td class="number">{escape(value)}</td>' for value in values)
        + "</tr>\n"
        for what, part, *values in expectation.table(found)
    )
    notes = " ".join(part.note for part in found)
    return (
        f"{heading}<figure>\n{drawing}<figcaption>{escape(notes)}</figcaption>\n</figure>\n"
        '<div class="wide" tabindex="0" role="region" aria-label="Planned and measured">\n<table>\n'
        "<caption>What hlat.plan says of this configuration, and what was measured</caption>\n"
        '<thead>\n<tr><th scope="col">Of</th><th scope="col">Part</th>'
        '<th scope="col" class="number">Planned</th><th scope="col" class="number">Measured</th>'
        '<th scope="col" class="number">The plan is off by</th></tr>\n</thead>\n'
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def _ledger(record: Record) -> str:
    rows = "".join(
        f'<tr><td>{escape(phase)}</td><th scope="row">{escape(source)}</th>'
        + "".join(f'<td class="number">{escape(value)}</td>' for value in values)
        + "</tr>\n"
        for phase, source, *values in summary.ledger(record)
    )
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col" class="number">{head}</th>'
        for head in ("Tokens", "Share", "Documents", "Epochs")
    )
    return (
        '<h2>Data</h2>\n<div class="wide" tabindex="0" role="region" aria-label="Data">\n<table>\n'
        "<caption>What was read, up to the last save</caption>\n<thead>\n"
        f'<tr><th scope="col">Phase</th><th scope="col">Source</th>{heads}</tr>\n</thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )


def _events(record: Record) -> str:
    if not record.events:
        return "<h2>Events</h2>\n<p>No event is recorded.</p>\n"
    rows = "".join(
        f'<tr><td class="time">{escape(time)}</td><td class="number">{escape(attempt)}</td>'
        f'<td class="number">{escape(step)}</td><td class="event">{escape(event)}</td>'
        f"<td>{escape(details)}</td></tr>\n"
        for time, attempt, step, event, details in summary.timeline(record)
    )
    return (
        '<h2>Events</h2>\n<div class="wide" tabindex="0" role="region" aria-label="Events">\n'
        '<table class="long">\n<caption>What happened, in order</caption>\n<thead>\n'
        '<tr><th scope="col">Time (UTC)</th><th scope="col" class="number">Attempt</th>'
        '<th scope="col" class="number">Step</th><th scope="col">Event</th>'
        f'<th scope="col">Details</th></tr>\n</thead>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n'
    )


def _origin(record: Record) -> str:
    short = {key: value for key, value in record.provenance.items() if not _is_long(value)}
    rows = "".join(
        f'<tr><th scope="row">{escape(_words(key))}</th><td>{escape(anything(value))}</td></tr>\n'
        for key, value in short.items()
    )
    table = (
        '<div class="wide" tabindex="0" role="region" aria-label="Provenance">\n<table>\n'
        f"<caption>Where it came from</caption>\n<tbody>\n{rows}</tbody>\n</table>\n</div>\n"
    )
    folded = [_folded("Resolved configuration", record.config)] if record.config else []
    for key, value in record.provenance.items():
        if key not in short:
            text = value if isinstance(value, str) else json.dumps(value, indent=2)
            folded.append(_folded(_words(key), text))
    return f"<h2>Provenance</h2>\n{table if rows else ''}{''.join(folded)}"


def _folded(title: str, text: str) -> str:
    return (
        f"<details>\n<summary>{escape(title)}</summary>\n"
        f'<pre tabindex="0">{escape(text)}</pre>\n</details>\n'
    )


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _is_long(value: Any) -> bool:
    return len(anything(value)) > 200 or (isinstance(value, str) and "\n" in value)
