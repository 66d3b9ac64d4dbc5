"""The page's style sheet: light and dark, wide and narrow, on screen and on paper.

The colours of runs have a contrast of at least 3:1 with the background. In two groups of four, with filled and with
hollow marks, they are distinguishable with red-green and with blue-yellow colour blindness.
"""

RUN_COLOURS = {
    "light": ("#00499a", "#e23413", "#0f9f6a", "#966390", "#683f68", "#6c841e", "#5931bd", "#6e1711"),
    "dark": ("#7b9ee5", "#eda73e", "#44e593", "#c9abc1", "#bfecdf", "#f2d939", "#968aff", "#e16d77"),
}
GROUNDS = {"light": "#ffffff", "dark": "#171a1f"}
INKS = {"light": ("#1d2127", "#59616c"), "dark": ("#e7e9ec", "#a5adb8")}
_LINES = {"light": ("#c9ced5", "#e6e9ed"), "dark": ("#4b525c", "#2b3037")}


def style_sheet() -> str:
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_colours('dark')} }} }}"
    runs = "\n".join(
        f".run-{number} {{ --run: var(--run-{number}); }}" for number in range(1, len(RUN_COLOURS["light"]) + 1)
    )
    return "\n".join((f":root {{ color-scheme: light dark; {_colours('light')} }}", dark, runs, _RULES))


def _colours(mode: str) -> str:
    ink, muted = INKS[mode]
    axis, grid = _LINES[mode]
    runs = "".join(f" --run-{number}: {colour};" for number, colour in enumerate(RUN_COLOURS[mode], start=1))
    return f"--ground: {GROUNDS[mode]}; --ink: {ink}; --muted: {muted}; --axis: {axis}; --grid: {grid};{runs}"


_RULES = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 70rem; padding: 2.5rem 1.5rem 4rem; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; font-weight: 650; letter-spacing: -.015em; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 3.2rem 0 .5rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0 .9rem; max-width: 44rem; }
.remark, figcaption, dt, small { color: var(--muted); }
.remark { font-size: .9rem; }
.warning { border-left: .3rem solid; padding-left: .6rem; font-weight: 600; }
small { font-size: .82em; }
dl.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1.2rem 2rem;
  margin: 1.8rem 0; }
dl.figures div { border-top: 2px solid var(--run-1); padding-top: .5rem; }
dt { font-size: .85rem; } dd { margin: 0; font-size: 1.45rem; font-weight: 600; line-height: 1.3; }
dd small { display: block; font-size: .82rem; font-weight: 400; line-height: 1.4; }
.box { overflow-x: auto; max-width: 100%; margin: .6rem 0 1.2rem; }
.box:focus-visible, summary:focus-visible { outline: 2px solid var(--run-1); outline-offset: 2px; }
table { overflow-wrap: normal; border-collapse: collapse; font-size: .92rem; line-height: 1.4; min-width: 50%; }
th, td { padding: .42rem 1.1rem .42rem 0; text-align: right; vertical-align: top; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th:last-child, td:last-child { padding-right: .2rem; }
thead th { white-space: normal; color: var(--muted); font-weight: 500; font-size: .85rem; vertical-align: bottom;
  border-color: var(--axis); }
tbody th, thead th:first-child { text-align: left; font-weight: 550; }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--ground); }
tbody th span.name { display: block; width: max-content; max-width: 22rem; white-space: normal;
  overflow-wrap: anywhere; padding-left: 1.2rem; text-indent: -1.2rem; }
.words { text-align: left; white-space: normal; min-width: 14rem; }
thead .words { display: block; }
.wrapped td { white-space: normal; overflow-wrap: anywhere; min-width: 5rem; }
.facts :is(td, thead th) { text-align: left; } .facts td { min-width: 4.5rem; overflow-wrap: break-word; }
td b { font-weight: 600; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; background: var(--run);
  margin-right: .5rem; }
.key:is(.run-5, .run-6, .run-7, .run-8) { background: none; border: 2.5px solid var(--run); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.4rem; list-style: none; margin: .4rem 0 1rem; padding: 0;
  font-size: .9rem; }
.legend svg { width: 2rem; height: .8rem; margin-right: .45rem; vertical-align: -.05rem; --run: var(--muted); }
fieldset { border: 0; padding: 0; margin: .8rem 0 1rem; display: flex; flex-wrap: wrap; align-items: center;
  gap: .35rem; font-size: .9rem; }
legend { float: left; padding: 0; margin-right: .6rem; color: var(--muted); }
fieldset input { position: absolute; opacity: 0; }
fieldset label { border: 1px solid var(--axis); border-radius: 1rem; padding: .22rem .95rem; cursor: pointer; }
fieldset input:checked + label { background: var(--ink); border-color: var(--ink); color: var(--ground); }
fieldset input:focus-visible + label { outline: 2px solid var(--run-1); outline-offset: 2px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1.6rem 2.4rem; }
.charts.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); }
.charts + .remark, .charts + .table { margin-top: 1.4rem; }
.by-time, .by-flops { display: none; }
.curves:has(#along-time:checked) .by-tokens, .curves:has(#along-flops:checked) .by-tokens { display: none; }
.curves:has(#along-time:checked) .by-time, .curves:has(#along-flops:checked) .by-flops { display: grid; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figcaption { font-size: .9rem; margin-bottom: .35rem; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--ink); }
svg .tick { fill: var(--muted); }
svg .stage text { font-size: 11px; fill: var(--muted); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--axis); stroke-width: 1; }
.band { fill: var(--ink); } .band.even { fill-opacity: .025; } .band.odd { fill-opacity: .075; }
.strip { fill: var(--run); } .strip.even { fill-opacity: .16; } .strip.odd { fill-opacity: .34; }
svg .stage .strip ~ text { fill: var(--ink); }
.line { fill: none; stroke: var(--run); stroke-width: 2; stroke-linecap: round; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
.line.training { stroke-width: 1.2; stroke-opacity: .7; }
.line.faint, .line.fastest { stroke-width: 1.3; stroke-opacity: .5; stroke-dasharray: 4 3; }
.mark { fill: var(--run); stroke: var(--ground); stroke-width: 1; }
.mark:is(.run-5, .run-6, .run-7, .run-8) { fill: var(--ground); stroke: var(--run); stroke-width: 1.5; }
.bar { fill: var(--run); fill-opacity: .85; }
.chart { position: relative; } .readouts, .readouts :is(label, input, u, .said) { position: absolute; }
.readouts :is(label, u) { top: 0; bottom: 0; } .readouts u { width: 0; border-left: 1px dashed var(--ink); }
.readouts input { opacity: 0; inset: 0; margin: 0; pointer-events: none; }
.readouts :is(u, .said) { display: none; }
.readouts :is(label:hover, label:focus-within) > :is(u, .said) { display: block; }
.readouts:hover label:not(:hover) > :is(u, .said) { display: none; }
.said { top: .3rem; z-index: 2; width: max-content; max-width: min(18rem, 40vw); pointer-events: none;
  padding: .3rem .6rem; border: 1px solid var(--axis); border-radius: .35rem; background: var(--ground);
  font-size: .8rem; line-height: 1.45; }
.said.after { left: calc(100% + .4rem); } .said.before { right: calc(100% + .4rem); }
.said b { font-weight: 600; } .said span { display: block; }
.said .key { width: .55rem; height: .55rem; margin-right: .35rem; }
.bar:is(.run-5, .run-6, .run-7, .run-8) { fill-opacity: .2; stroke: var(--run); stroke-width: 1.5; }
details { border-bottom: 1px solid var(--grid); padding: .5rem 0; }
details details { margin-left: 1rem; }
summary { cursor: pointer; }
pre { overflow-x: auto; background: color-mix(in srgb, var(--ink) 5%, transparent); border-radius: .4rem;
  padding: .9rem 1rem;
  font: .82rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
blockquote { margin: .6rem 0 1.2rem; padding: .1rem 0 .1rem 1rem; border-left: 3px solid var(--axis);
  white-space: pre-wrap; max-width: 44rem; }
blockquote b { font-weight: 600; }
@media (max-width: 40rem) {
  body { padding: 1.4rem 1rem 3rem; font-size: 15px; }
  h1 { font-size: 1.4rem; } h2 { margin-top: 2.4rem; }
  dl.figures { grid-template-columns: 1fr 1fr; gap: 1rem 1.4rem; } dd { font-size: 1.2rem; }
  tbody th span.name { max-width: 9.5rem; }
  .said { font-size: .72rem; padding: .2rem .4rem; }
  svg text { font-size: 15px; } svg .stage text { font-size: 13px; }
}
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10.5pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  svg text { font-size: 14px; } p { break-inside: avoid; }
  fieldset, .readouts { display: none; } h2 { margin-top: 1.6rem; break-after: avoid; }
  .charts { grid-template-columns: 1fr 1fr; gap: 1rem 1.4rem; } .charts.small { grid-template-columns: 1fr 1fr 1fr; }
  tbody th, thead th:first-child { position: static; }
  .box { overflow: visible; } th, td { white-space: normal; padding-right: .7rem; } .words { min-width: 0; }
  table { font-size: 8pt; } thead th { font-size: 1em; }
  tr { break-inside: avoid; } figcaption, h2 + .remark { break-after: avoid; }
  dl.figures { grid-template-columns: repeat(5, 1fr); gap: 1rem; } dd { font-size: 1.1rem; }
  .folded:not(:has(details[open])) { display: none; }
}
"""
