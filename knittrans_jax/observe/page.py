"""One HTML page in one file: style sheet for phone, desktop, dark and paper inside; nothing comes from elsewhere, no script."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--panel:#f6f7f9;--ink:#1c2127;--soft:#5a6470;--rule:#d9dee4;--grid:#e6e9ee;
--good:#00734f;--bad:#b3261e;--warn:#8a5a00;
--p0:#0072b2;--p1:#d55e00;--p2:#009e73;--p3:#b04f8b;--p4:#e69f00;--p5:#56b4e9;--p6:#7a7f87}
@media(prefers-color-scheme:dark){:root{--bg:#14171b;--panel:#1d2127;--ink:#e8ebef;--soft:#a3adb8;--rule:#363d46;
--grid:#2a3038;--good:#4cc79b;--bad:#ff8a80;--warn:#f0b95a;
--p0:#4aa8e0;--p1:#f08040;--p2:#2fc598;--p3:#dd8fbe;--p4:#f0b840;--p5:#8ccff5;--p6:#9aa1aa}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1220px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;line-height:1.2;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .2rem;padding-top:.7rem;border-top:1px solid var(--rule)}
h3{font-size:.95rem;margin:0 0 .15rem;font-weight:600}
p{margin:.3rem 0;max-width:75ch}
.soft,.note{color:var(--soft)} .note{font-size:.85rem;line-height:1.4;max-width:85ch}
.good{color:var(--good)} .bad{color:var(--bad)} .warn{color:var(--warn)} .badge{font-weight:600;overflow-wrap:anywhere}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:14px;margin-top:.7rem;
align-items:start}
.tiles{grid-template-columns:repeat(auto-fill,minmax(min(46%,165px),1fr));gap:10px}
figure,.card,.tile{margin:0;background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;
min-width:0}
.wide{grid-column:1/-1}
.tile b{display:block;font-size:1.3rem;line-height:1.25;overflow-wrap:anywhere}
.tile span{font-size:.82rem;color:var(--soft);line-height:1.35;display:block}
.legend{display:flex;flex-wrap:wrap;gap:.1rem .8rem;font-size:.82rem;margin:.1rem 0 .3rem}
.legend svg{width:22px;height:10px;vertical-align:middle;margin-right:.3rem}
figure>svg{display:block;width:100%;height:auto}
table{border-collapse:collapse;font-size:.88rem;width:100%} .scroll{overflow-x:auto}
th,td{text-align:right;padding:.22rem .5rem;border-bottom:1px solid var(--rule);font-variant-numeric:tabular-nums;
vertical-align:top}
th:last-child,td:last-child{padding-right:0}
th:first-child,td:first-child{text-align:left;padding-left:0} th{font-weight:600}
tr.sum td{font-weight:600;border-top:2px solid var(--rule)}
td:not(:first-child):not(.text){white-space:nowrap} td.text,th.text{text-align:left;overflow-wrap:anywhere;min-width:5.5em}
dl{display:grid;grid-template-columns:auto 1fr;gap:.15rem .8rem;font-size:.88rem;margin:.4rem 0}
dt{font-weight:600} dd{margin:0} details{margin-top:.8rem} summary{cursor:pointer;font-weight:600}
pre{font:12.5px/1.4 ui-monospace,Menlo,Consolas,monospace;background:var(--panel);border:1px solid var(--rule);
border-radius:8px;padding:10px;overflow-x:auto}
text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)} text.title{fill:var(--ink)}
.c0{--c:var(--p0)}.c1{--c:var(--p1)}.c2{--c:var(--p2)}.c3{--c:var(--p3)}.c4{--c:var(--p4)}.c5{--c:var(--p5)}
.c6{--c:var(--p6)}.c7{--c:var(--ink)}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}
.fill{fill:var(--c)} .band{fill:var(--c);fill-opacity:.25} .dot{fill:var(--c);stroke:var(--panel);stroke-width:1}
.tip{fill:transparent} .tip:hover{fill:var(--ink);fill-opacity:.06}
path.grid{stroke:var(--grid);stroke-width:1} .axis,.zero{stroke:var(--soft);stroke-width:1}
.version{stroke:var(--ink);stroke-width:.6;stroke-opacity:.45;stroke-dasharray:2 2}
.finish{fill:var(--ink);fill-opacity:.75}
@media(max-width:520px){main{padding:10px}.grid{gap:10px}figure,.card,.tile{padding:8px}h2{margin-top:1.5rem}
.wide table{font-size:.78rem}.wide th,.wide td{padding:.2rem .25rem}}
@media print{:root{color-scheme:light;--bg:#fff;--panel:#fff;--ink:#000;--soft:#444;--rule:#bbb;--grid:#ddd;
--good:#00543a;--bad:#8c1d18;--warn:#6b4500;
--p0:#0072b2;--p1:#d55e00;--p2:#009e73;--p3:#b04f8b;--p4:#e69f00;--p5:#56b4e9;--p6:#7a7f87}
@page{margin:14mm 12mm} html{font-size:13px} body{font-size:1rem} main{max-width:none;padding:0}
.grid{display:block} .grid>*{display:inline-block;width:49%;margin:0 .7% 7px 0;vertical-align:top}
.grid>.wide{display:block;width:auto} .tiles{display:grid;grid-template-columns:repeat(6,1fr);gap:6px}
.tiles>*{width:auto;margin:0} table{font-size:.8rem}
th,td{padding:.15rem .3rem} h2{margin-top:1.2rem} .tile{padding:5px 7px} .tile b{font-size:1.1rem}
figure,.card,.tile,tr,.note,dl{break-inside:avoid} h2,h3,.note{break-after:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
details:not([open]){display:none} .scroll{overflow:visible}}
"""
"""The palette is Okabe and Ito's, its purple darkened and its black and yellow left out, with lighter shades for dark pages."""


@dataclasses.dataclass(frozen=True)
class Key:
    """An entry of a legend. `shape`: `line`, `fill`, `band` or `dot`; `dash` as in the chart."""

    name: str
    colour: int
    shape: str = "line"
    dash: str = ""


def page(title: str, body: Sequence[str]) -> bytes:
    """The whole file."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    ).encode()


def section(title: str, note: str, parts: Sequence[str]) -> str:
    """A part of the page: what it shows, then figures and tables side by side. Empty parts are left out."""
    shown = "".join(part for part in parts if part)
    if not shown:
        shown = '<p class="soft">Nothing to show: no update was trained.</p>'
    return f'<section><h2>{html.escape(title)}</h2><p class="note">{note}</p><div class="grid">{shown}</div></section>'


def figure(title: str, svg: str, keys: Sequence[Key] = (), note: str = "") -> str:
    """A chart with its legend; empty without a chart."""
    if not svg:
        return ""
    legend = "".join(f"<span>{_swatch(key)}{html.escape(key.name)}</span>" for key in keys)
    return (
        f"<figure><h3>{html.escape(title)}</h3>"
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + svg
        + (f'<figcaption class="note">{html.escape(note)}</figcaption>' if note else "")
        + "</figure>"
    )


def table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    last_is_sum: bool = False,
    text: Sequence[int] = (),
    note: str = "",
    css: str = "",
) -> str:
    """A table; the first column names the rows. `text`: further columns of prose, set to the left. `css`: `wide`
    for the whole width. Empty without rows."""
    if not rows:
        return ""

    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{_css('text') if i in text else ''}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    body = "".join(
        f"<tr{_css('sum') if last_is_sum and i == len(rows) - 1 else ''}>{row(cells, 'td')}</tr>"
        for i, cells in enumerate(rows)
    )
    return (
        f'<div class="card {css}"><h3>{html.escape(title)}</h3><div class="scroll"><table>'
        f"<thead><tr>{row(head, 'th')}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>" + (f'<p class="note">{html.escape(note)}</p>' if note else "") + "</div>"
    )


def tiles(pairs: Sequence[tuple[str, str]]) -> str:
    """(figure, what it is) as a row of tiles."""
    return (
        '<div class="grid tiles">'
        + "".join(f'<div class="tile"><b>{html.escape(v)}</b><span>{html.escape(n)}</span></div>' for v, n in pairs)
        + "</div>"
    )


def _css(name: str) -> str:
    return f' class="{name}"'


def _swatch(key: Key) -> str:
    css = f"{key.shape} c{key.colour}"
    if key.shape == "line":
        dash = f' stroke-dasharray="{key.dash}"' if key.dash else ""
        shape = f'<path class="{css}" d="M0 5H22"{dash}/>'
    elif key.shape == "dot":
        shape = f'<circle class="{css}" cx="11" cy="5" r="3.5"/>'
    else:
        shape = f'<rect class="{css}" width="22" height="10" rx="2"/>'
    return f'<svg viewBox="0 0 22 10" aria-hidden="true">{shape}</svg>'
