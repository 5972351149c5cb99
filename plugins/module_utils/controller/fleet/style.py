# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The style sheet of the page. Python text, because Ansible sends a module's Python files to the node and no others."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f6f8; --card: #ffffff; --ink: #1b2230; --soft: #5a6476; --line: #dfe3ea; --accent: #2457c5;
  --shade: #eef1f5; --focus: #2457c5; --bar: #b9c6de;
  --ok: #cfe8da; --ok-ink: #1d6b45;
  --unreachable: #303846; --unreachable-ink: #ffffff;
  --failed: #b3261e; --failed-ink: #ffffff;
  --agent: #7c3aad; --agent-ink: #ffffff;
  --drifted: #f08c1a; --drifted-ink: #2b1600;
  --stale: #f6d34a; --stale-ink: #3a2d00;
  --refused: #9a6b2f; --refused-ink: #ffffff;
  --warned: #faebb0; --warned-ink: #5b4700;
  --differs: #c7daf9; --differs-ink: #153e86;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --card: #1a2029; --ink: #e4e8ef; --soft: #9aa5b8; --line: #2e3744; --accent: #86aef9;
    --shade: #232b37; --focus: #86aef9; --bar: #47597a;
    --ok: #21493a; --ok-ink: #a9e2c6;
    --unreachable: #d5dae3; --unreachable-ink: #161b23;
    --failed: #cf3a32; --failed-ink: #fff;
    --agent: #b784e0; --agent-ink: #1f0b30;
    --drifted: #f29a37; --drifted-ink: #2b1600;
    --stale: #e3c243; --stale-ink: #2d2300;
    --refused: #c79a5d; --refused-ink: #211300;
    --warned: #6d5c1f; --warned-ink: #fff1bd;
    --differs: #2c4a80; --differs-ink: #dbe8ff;
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; }
main, header.top, footer { max-width: 1380px; margin: 0 auto; padding: 0 28px; }
header.top { padding-top: 30px; }
h1 { font-size: 24px; line-height: 1.2; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 12px; letter-spacing: -0.005em; }
h3 { font-size: 14px; margin: 0; }
p { margin: 0; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: 0.92em; }
:focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; border-radius: 3px; }
.skip { position: absolute; left: -9999px; }
.skip:focus { left: 12px; top: 12px; background: var(--card); padding: 8px 12px; z-index: 9; }
.soft { color: var(--soft); }
.meta { color: var(--soft); margin-top: 4px; }
section { margin: 26px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 20px 22px; }

.verdict { font-size: 21px; font-weight: 600; letter-spacing: -0.01em; }
.figures { display: flex; flex-wrap: wrap; gap: 4px 38px; margin: 14px 0 18px; }
.figures div { display: flex; flex-direction: column-reverse; }
.figures dt { color: var(--soft); font-size: 12.5px; }
.figures dd { margin: 0; font-size: 22px; font-weight: 600; line-height: 1.25; }
svg.share { display: block; width: 100%; height: 14px; border-radius: 7px; }
svg.share rect, svg.tally rect { shape-rendering: crispEdges; }
.f-ok { fill: var(--ok); } .f-unreachable { fill: var(--unreachable); } .f-failed { fill: var(--failed); }
.f-agent { fill: var(--agent); } .f-drifted { fill: var(--drifted); } .f-stale { fill: var(--stale); }
.f-warned { fill: var(--warned); } .f-differs { fill: var(--differs); }
.tallies { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 20px 34px; margin-top: 22px;
  padding-top: 18px; border-top: 1px solid var(--line); }
.tallies h3 { color: var(--soft); font-weight: 500; font-size: 12.5px; margin-bottom: 6px; }
.tallies table { width: 100%; border-collapse: collapse; font-size: 13px; }
.tallies th { font-weight: 400; text-align: left; padding: 1px 10px 1px 0; max-width: 190px; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }
.tallies td { padding: 1px 0; text-align: right; width: 1%; white-space: nowrap; }
.tallies td.graph { width: 34%; padding-right: 10px; }
svg.tally { display: block; width: 100%; height: 8px; }
svg.tally rect { fill: var(--bar); }

.badge { display: inline-block; min-width: 20px; height: 20px; padding: 0 5px; border-radius: 4px; text-align: center;
  font: 600 12px/20px ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; }
.s-ok { background: var(--ok); color: var(--ok-ink); }
.s-unreachable { background: var(--unreachable); color: var(--unreachable-ink); }
.s-failed { background: var(--failed); color: var(--failed-ink); }
.s-agent { background: var(--agent); color: var(--agent-ink); }
.s-drifted { background: var(--drifted); color: var(--drifted-ink); }
.s-stale { background: var(--stale); color: var(--stale-ink); }
.s-refused { background: var(--refused); color: var(--refused-ink); }
.s-warned { background: var(--warned); color: var(--warned-ink); }
.s-differs { background: var(--differs); color: var(--differs-ink); }
.k0 { background: #3f74c9; color: #fff; } .k1 { background: #e08a1e; color: #241400; }
.k2 { background: #24796a; color: #fff; } .k3 { background: #b94a73; color: #fff; }
.k4 { background: #7b5fb5; color: #fff; } .k5 { background: #b9b03a; color: #262300; }
.k6 { background: #5fb4d9; color: #06222e; } .k7 { background: #667080; color: #fff; }
.k8 { background: var(--shade); color: var(--soft); }

.exceptions { display: grid; gap: 10px; }
.exceptions details.kind { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.exceptions details.kind > summary { display: flex; align-items: center; gap: 12px; padding: 11px 18px; cursor: pointer;
  list-style: none; }
.exceptions summary::-webkit-details-marker { display: none; }
.exceptions details.kind > summary::after { content: "+"; margin-left: auto; color: var(--soft); font-size: 18px;
  line-height: 1; }
.exceptions details.kind[open] > summary::after { content: "\\2212"; }
.kind .what { color: var(--soft); }
.kind table { width: 100%; border-collapse: collapse; font-size: 13.5px; }
.kind .body { padding: 0 18px 12px; }
.kind th, .kind td { text-align: left; vertical-align: top; padding: 7px 14px 7px 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
.kind thead th { color: var(--soft); font-weight: 500; font-size: 12.5px; }
.kind td.number, .kind th.number { text-align: right; width: 64px; white-space: nowrap; overflow-wrap: normal; }
.kind td.who { width: 34%; padding-right: 0; }
.kind tbody th { font-weight: 600; width: 14%; }
#kind-refused tbody th { width: 28%; }
.names a { white-space: nowrap; margin-right: 9px; }
details.more { display: inline; }
details.more > summary { display: inline; cursor: pointer; color: var(--accent); }
.allclear { display: flex; gap: 12px; align-items: center; }

.toolbar { display: none; }
.js .toolbar { display: flex; flex-wrap: wrap; gap: 10px 18px; align-items: end; margin-bottom: 12px; }
.toolbar label { display: flex; flex-direction: column; font-size: 12.5px; color: var(--soft); gap: 3px; }
.toolbar input, .toolbar select { font: inherit; color: var(--ink); background: var(--page);
  border: 1px solid var(--line); border-radius: 6px; padding: 6px 10px; height: 34px; }
.toolbar input { width: min(340px, 80vw); }
.toolbar output { margin-left: auto; color: var(--soft); padding-bottom: 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px; margin: 0 0 16px; padding: 0; list-style: none; }
.chip { display: inline-flex; align-items: center; gap: 7px; font: inherit; font-size: 13px; color: var(--ink);
  background: transparent; border: 1px solid var(--line); border-radius: 16px; padding: 2px 11px 2px 4px;
  cursor: pointer; }
.chip .badge { border-radius: 11px; }
.chip[aria-pressed="true"] { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); }
.chip b { font-weight: 600; }

.stage { display: grid; grid-template-columns: minmax(0, 1fr); gap: 24px; }
.js .stage { grid-template-columns: minmax(0, 1fr) 350px; }
.matrix { display: flex; flex-wrap: wrap; gap: 4px; align-content: flex-start; margin: 0; padding: 0;
  list-style: none; }
.cell { display: block; width: 26px; height: 26px; border-radius: 4px; text-align: center; user-select: none;
  font: 600 13px/26px ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; }
.cell:hover { text-decoration: none; box-shadow: 0 0 0 2px var(--ink); }
.cell[aria-current="true"] { box-shadow: 0 0 0 2px var(--card), 0 0 0 4px var(--accent); }
.cell:focus-visible { outline-offset: 1px; position: relative; z-index: 2; }
.dense .matrix { gap: 2px; }
.dense .cell { width: 20px; height: 20px; font-size: 11px; line-height: 20px; border-radius: 3px; }
[hidden] { display: none !important; }
.panel { display: none; }
.js .panel { display: block; position: sticky; top: 16px; align-self: start; max-height: calc(100vh - 32px);
  overflow: auto; border-left: 1px solid var(--line); padding: 0 0 0 22px; overflow-wrap: anywhere; }
.panel .head { display: flex; gap: 10px; align-items: center; margin-bottom: 10px; }
.panel h3 { font-size: 16px; }
.panel ul { margin: 0 0 12px; padding: 0; list-style: none; font-size: 13px; }
.panel li { padding: 4px 0 4px 30px; position: relative; }
.panel li .badge { position: absolute; left: 0; top: 5px; }
.panel dl { display: grid; grid-template-columns: 96px minmax(0, 1fr); gap: 3px 10px; margin: 0 0 12px;
  font-size: 13px; }
.panel dt { color: var(--soft); }
.panel dd { margin: 0; }
.panel h4 { margin: 12px 0 4px; font-size: 12.5px; font-weight: 500; color: var(--soft); }
.panel table { width: 100%; border-collapse: collapse; font-size: 13px; }
.panel td, .panel th { padding: 2px 0 2px 8px; text-align: right; border-top: 1px solid var(--line); font-weight: 400; }
.panel th:first-child { text-align: left; padding-left: 0; }
.panel thead th { color: var(--soft); border: 0; }
.tip { position: fixed; z-index: 8; max-width: 340px; pointer-events: none; background: var(--ink); color: var(--card);
  border-radius: 6px; padding: 5px 10px; font-size: 12.5px; line-height: 1.4; overflow-wrap: anywhere; }

.wide { overflow-x: auto; }
table.nodes { width: 100%; border-collapse: collapse; font-size: 13px; }
table.nodes caption { text-align: left; color: var(--soft); padding-bottom: 8px; }
table.nodes th, table.nodes td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
table.nodes thead th { color: var(--soft); font-weight: 500; background: var(--card); position: sticky; top: 0; }
table.nodes tbody th { font-weight: 600; }
table.nodes .number { text-align: right; }
table.nodes thead button { all: unset; cursor: pointer; }
table.nodes thead button:focus-visible { outline: 3px solid var(--focus); }
table.nodes [aria-sort="ascending"] button::after { content: " \\2191"; }
table.nodes [aria-sort="descending"] button::after { content: " \\2193"; }
table.nodes tbody tr:target, table.nodes tbody tr.current { background: var(--shade); }
table.nodes .badge { margin-right: 7px; }
footer { color: var(--soft); font-size: 12.5px; padding-bottom: 36px; }
.nothing { color: var(--soft); padding: 10px 0; }

@media (max-width: 900px) {
  main, header.top, footer { padding-left: 16px; padding-right: 16px; }
  .js .stage { grid-template-columns: minmax(0, 1fr); }
  .js .panel { position: static; border-left: 0; border-top: 1px solid var(--line); padding: 16px 0 0;
    max-height: none; }
  .kind td.who, .kind tbody th { width: auto; }
}
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
@media (forced-colors: active) { .cell, .badge { border: 1px solid CanvasText; } }
@media print {
  :root { color-scheme: light; --page: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --accent: #000; }
  body { font-size: 10px; }
  main, header.top, footer { max-width: none; padding: 0; }
  .card { border: 0; padding: 0; }
  .toolbar, .js .toolbar, .panel, .js .panel, .tip, .skip, .chip[aria-pressed="true"]::after { display: none; }
  .js .stage { display: block; }
  .cell, .badge, svg { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  table.nodes { font-size: 8.5px; }
  table.nodes thead { display: table-header-group; }
  tr, .tallies, .figures { break-inside: avoid; }
  table.nodes th, table.nodes td { padding: 2px 6px 2px 0; }
  .wide { overflow: visible; }
}
"""
