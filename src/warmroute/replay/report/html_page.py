"""The report as one HTML page: no scripts, nothing to download, light or dark by the reader's own setting."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from warmroute.look import theme_css
from warmroute.replay.report import svg, svg_plots
from warmroute.replay.report.table import LOAD_COLUMNS, Column, best_of, by_load, columns, loop_name, ms
from warmroute.replay.summary import Run

ERROR_COLUMNS = ("preemptions", "rejected", "failed", "left", "retries")


def page(runs: Sequence[Run], title: str, measured: Run | None = None) -> str:
    """`measured`: what the capture that was replayed measured."""
    series = {name: at for at, name in enumerate(dict.fromkeys(run["policy"] for run in runs))}
    loads = sorted({load for run in runs if (load := svg_plots.load_of(run)) is not None})
    last = [run for run in runs if svg_plots.load_of(run) == (loads[-1] if loads else None)]
    at_last = f", at {loads[-1]:g} {_unit(runs)}" if len(loads) > 1 else ""
    sections: list[str] = []
    if len(loads) > 1:
        name = _load_name(runs)
        for percent, words in (("p50", "Half of the requests wait less."), ("p90", "One in ten waits longer.")):
            drawn = svg_plots.time_against_load(runs, series, "ttft_ms", percent, name)
            sections.append(_section(f"Time to first token, {percent}", f"{words} Lower is better.", drawn))
    else:
        words = "From a request's arrival to its first token: p50, p90 and p99 on a logarithmic scale. Lower is better."
        sections.append(_section("Time to first token", words, svg_plots.time_ranges(runs, series, "ttft_ms")))
        words = "Mean time between two tokens of a request: p50, p90 and p99. Lower is better."
        sections.append(_section("Time per token", words, svg_plots.time_ranges(runs, series, "inter_token_ms")))
    words = f"Nodes that serve requests{at_last}. The area under a line is the time paid for."
    sections.append(_section("Nodes over time", words, svg_plots.nodes_over_time(last, series)))
    words = f"Cached fraction of the prompt tokens, by the time of arrival{at_last}."
    sections.append(_section("Hit rate over time", words, svg_plots.hits_over_time(last, series)))
    words = f"Mean requests in flight on each node{at_last}. The dashed line is the mean of all nodes."
    sections.append(_section("Load by node", words, svg_plots.load_by_node(last, series)))
    style = "\n" + theme_css() + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    style += "".join(f".c{at} {{ --c: var(--c{at}); }} " for at in range(svg.COLOURS))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Warmroute replay: {escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p>{escape(_subtitle(runs))}</p>\n<p class="lead">{_lead(runs)}</p>\n'
        f'<section class="bare plots">\n{"".join(sections)}</section>\n'
        "<section>\n<h2>All numbers</h2>\n<p>The best value at each load is marked.</p>\n"
        f'<div class="scroll">{_table(runs, series, measured)}</div>\n</section>\n'
        "<footer><p>Simulated engines in virtual time under the production router core. Hover over a mark for its "
        "numbers.</p></footer>\n</main>\n</body>\n</html>\n"
    )


def _section(title: str, words: str, drawn: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(words)}</p>\n{drawn}\n</section>\n" if drawn else ""


def _load_name(runs: Sequence[Run]) -> str:
    if runs[0]["rate"] is not None:
        return "requests per second"
    return "concurrent clients" if runs[0]["concurrency"] is not None else "queue threshold"


def _unit(runs: Sequence[Run]) -> str:
    name = _load_name(runs)
    return {"requests per second": "requests/s", "concurrent clients": "clients"}.get(name, name)


def _subtitle(runs: Sequence[Run]) -> str:
    policies = len({run["policy"] for run in runs})
    fewest, most = (pick(run["requests"] for run in runs) for pick in (min, max))
    requests = f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}"
    loads = len({svg_plots.load_of(run) for run in runs})
    counts = f"{policies} {'policies' if policies > 1 else 'policy'}, {requests} requests"
    return f"{counts} per run{f', {loads} loads' if loads > 1 else ''}, {loop_name(runs)}, seed {runs[0]['seed']}."


def _lead(runs: Sequence[Run]) -> str:
    """Return the result in a sentence: which policy has the lowest TTFT at the highest load."""
    loads = [load for run in runs if (load := svg_plots.load_of(run)) is not None]
    top = [run for run in runs if svg_plots.load_of(run) == (max(loads) if loads else None) and run["ttft_ms"]["p90"]]
    if len(top) < 2:
        return "One policy: nothing to compare."
    best, worst = (pick(top, key=lambda run: run["ttft_ms"]["p90"]) for pick in (min, max))
    if best is worst:
        return "All policies have the same TTFT."
    times = worst["ttft_ms"]["p90"] / best["ttft_ms"]["p90"]
    factor = f"{times:,.0f}" if times >= 20 else f"{times:.1f}"
    where = f" at {max(loads):g} {_unit(runs)}" if len(set(loads)) > 1 else ""
    return (
        f"Lowest p90 time to first token{where}: <b>{escape(best['policy'])}</b> with {ms(best['ttft_ms']['p90'])}; "
        f"{escape(worst['policy'])} takes {ms(worst['ttft_ms']['p90'])}, {factor} times as long."
    )


def _table(runs: Sequence[Run], series: dict[str, int], measured: Run | None) -> str:
    hidden = [head for head in ERROR_COLUMNS if not any(run.get(head) for run in runs)]
    shown = [column for column in columns(runs) if column.head not in (*LOAD_COLUMNS, *hidden)]
    head = "".join(f"<th>{escape(column.head)}</th>" for column in shown)
    rows: list[str] = []
    for group in by_load(runs):
        best = [best_of(group, column) for column in shown]
        load = svg_plots.load_of(group[0])
        if load is not None:
            rows.append(f'<tr class="load"><td colspan="{len(shown)}">{load:g} {_unit(runs)}</td></tr>')
        for run in group:
            cells = "".join(_cell(run, column, good, series) for column, good in zip(shown, best, strict=True))
            rows.append(f"<tr>{cells}</tr>")
    if measured is not None:
        rows.append(f'<tr class="load"><td colspan="{len(shown)}">The live fleet, as the capture has it</td></tr>')
        cells = "".join(_cell(measured, column, None, series) for column in shown)
        rows.append(f"<tr>{cells}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cell(run: Run, column: Column, good: float | None, series: dict[str, int]) -> str:
    at = series.get(run["policy"])
    colour = f'style="color: var({f"--c{at % svg.COLOURS}" if at is not None else "--soft"})"'
    words = escape(column.text(run))
    if column.head == "policy":
        words = f'<span class="key" {colour}></span>{words}'
    elif column.head == "hit rate":
        words = f'<span class="meter" {colour}><i style="width: {run["hit_rate"]:.1%}"></i></span>{words}'
    best = good is not None and column.value is not None and run["policy"] != "oracle" and column.value(run) == good
    return f'<td class="best">{words}</td>' if best else f"<td>{words}</td>"
