// Charts over the same time, drawn by uPlot. The numbers at the cursor, or the latest ones, are text in the legend.
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { byId, el, setText } from "./dom";
import { decimal, ms, NONE, percent, rate } from "./format";
import { colour } from "./theme";
import type { Row, Snapshot } from "./types";

interface Series {
  field: string;
  label: string;
  colour: string;
  dashed?: boolean;
  fill?: boolean;
}

interface ChartSpec {
  title: string;
  note: string;
  series: Series[];
  format: (value: number | null) => string;
  axis: (value: number) => string;
  top?: number;
}

const orNone = (write: (value: number) => string) => (value: number | null) => (value === null ? NONE : write(value));

const SPECS: ChartSpec[] = [
  {
    title: "Prompt tokens cached",
    note: "higher is better",
    series: [
      { field: "hit_ratio", label: "this router", colour: "c0", fill: true },
      { field: "round_robin_hit_ratio", label: "round robin, estimated", colour: "c7", dashed: true },
    ],
    format: percent,
    axis: (value) => `${Math.round(value * 100)} %`,
    top: 1,
  },
  {
    title: "Prefill saved",
    note: "GPU s per s",
    series: [
      { field: "saved_gpus", label: "this router", colour: "c2", fill: true },
      { field: "round_robin_saved_gpus", label: "round robin, estimated", colour: "c7", dashed: true },
    ],
    format: orNone(decimal),
    axis: decimal,
  },
  {
    title: "Time to first token",
    note: "lower is better",
    series: [
      { field: "ttft_p90_ms", label: "p90", colour: "c1" },
      { field: "ttft_p50_ms", label: "p50", colour: "c0" },
    ],
    format: ms,
    axis: (value) => ms(value),
  },
  {
    title: "Total time",
    note: "from arrival to the end, streamed or not",
    series: [
      { field: "duration_p90_ms", label: "p90", colour: "c1" },
      { field: "duration_p50_ms", label: "p50", colour: "c0" },
    ],
    format: ms,
    axis: (value) => ms(value),
  },
  {
    title: "Time per output token",
    note: "of streams",
    series: [
      { field: "token_p90_ms", label: "p90", colour: "c1" },
      { field: "token_p50_ms", label: "p50", colour: "c0" },
    ],
    format: ms,
    axis: (value) => ms(value),
  },
  {
    title: "Requests",
    note: "and their queue",
    series: [
      { field: "requests_per_s", label: "completed/s", colour: "c0", fill: true },
      { field: "waiting", label: "waiting", colour: "c1" },
      { field: "rejected_per_s", label: "rejected/s", colour: "c3" },
      { field: "client_errors_per_s", label: "client errors/s", colour: "c4" },
      { field: "failed_per_s", label: "failed/s", colour: "bad" },
    ],
    format: orNone(rate),
    axis: rate,
  },
];

const HEIGHT = 168;
const DASH: Record<string, number[]> = { dashed: [5, 4], solid: [] };

class Chart {
  readonly element: HTMLElement;
  private readonly canvas: HTMLElement;
  private readonly values: HTMLElement[];
  private plot: uPlot | null = null;
  private data: uPlot.AlignedData = [[]];

  constructor(
    private readonly spec: ChartSpec,
    private readonly sync: uPlot.SyncPubSub,
  ) {
    this.values = spec.series.map(() => el("b", {}, NONE));
    this.canvas = el("div", { class: "plot", role: "img" });
    const keys = spec.series.map((series, index) =>
      el("li", {}, el("span", { class: `key ${series.colour}${series.dashed ? " dashed" : ""}`, "aria-hidden": "true" }), `${series.label} `, this.values[index]),
    );
    this.element = el(
      "figure",
      { class: "card chart" },
      el("figcaption", {}, el("h3", {}, spec.title), el("span", { class: "soft" }, spec.note)),
      el("ul", { class: "legend" }, ...keys),
      this.canvas,
    );
  }

  draw(fields: string[], points: Row[], step_s: number): void {
    const rows = withGaps(points, step_s);
    const columns = ["at_s", ...this.spec.series.map((series) => series.field)].map((field) => fields.indexOf(field));
    this.data = columns.map((column) => rows.map((row) => row[column] ?? null)) as unknown as uPlot.AlignedData;
    this.show(rows.length - 1);
    const latest = this.spec.series.map((series, index) => `${series.label} ${this.values[index]?.textContent}`);
    this.canvas.setAttribute("aria-label", `${this.spec.title} over time. Latest: ${latest.join(", ")}.`);
    if (this.plot) this.plot.setData(this.data);
    else this.create();
  }

  /** Show the values at an index of the data. */
  private show(index: number): void {
    this.spec.series.forEach((_, series) => {
      const value = this.data[series + 1]?.[index];
      const element = this.values[series];
      if (element) setText(element, this.spec.format(value ?? null));
    });
  }

  private measured(): boolean {
    return this.data.slice(1).some((column) => Array.from(column).some((value) => value !== null));
  }

  create(): void {
    this.plot?.destroy();
    this.plot = null;
    const width = this.canvas.clientWidth;
    if (!width) return;
    const [ink, grid] = [colour("soft"), colour("line")];
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: ink, font, grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const top = this.spec.top;
    this.plot = new uPlot(
      {
        width,
        height: HEIGHT,
        legend: { show: false },
        padding: [10, 32, 0, 0], // half of the outermost labels' height and width
        cursor: { sync: { key: this.sync.key }, points: { size: 6 }, drag: { x: false, y: false } },
        scales: { y: { range: (_plot, _low, high) => [0, top ?? Math.max(high * 1.1, 1e-3)] } },
        axes: [
          { ...axis, size: 28, space: 70, values: (_plot, ticks) => ticks.map((tick) => timeLabel(tick)) },
          { ...axis, size: (_plot, labels) => axisWidth(labels, font), space: 34, values: (_plot, ticks) => ticks.map((tick) => (this.measured() ? this.spec.axis(tick) : "")) },
        ],
        series: [
          {},
          ...this.spec.series.map((series) => ({
            stroke: colour(series.colour),
            width: 1.6,
            dash: series.dashed ? DASH.dashed : DASH.solid,
            fill: series.fill ? withAlpha(colour(series.colour), 0.12) : undefined,
            points: { show: false, size: 4, fill: colour(series.colour), filter: lonelyPoints },
            spanGaps: false,
          })),
        ],
        hooks: { setCursor: [(plot) => this.show(plot.cursor.idx ?? (this.data[0]?.length ?? 0) - 1)] },
      },
      this.data,
      this.canvas,
    );
  }

  resize(): void {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
    else if (!this.plot) this.create();
  }
}

/** Add an empty row where points are missing, so that no line is drawn across the time between them. */
function withGaps(rows: Row[], step_s: number): Row[] {
  return rows.flatMap((row, index) => {
    const before = rows[index - 1]?.[0];
    const missing = typeof before === "number" && typeof row[0] === "number" && row[0] - before > 2.5 * step_s;
    return missing ? [[before + step_s, ...row.slice(1).map(() => null)], row] : [row];
  });
}

/** The measurements without one beside them: a line does not show them. */
function lonelyPoints(plot: uPlot, series: number): number[] {
  const values = plot.data[series] ?? [];
  const empty = (index: number) => values[index] === null || values[index] === undefined;
  return Array.from(values.keys()).filter((index) => !empty(index) && empty(index - 1) && empty(index + 1));
}

/** The labels' width, so that none is cut. */
function axisWidth(labels: string[] | null, font: string): number {
  const context = document.createElement("canvas").getContext("2d");
  if (!context || !labels) return 58;
  context.font = font;
  return Math.max(36, ...labels.map((label) => Math.ceil(context.measureText(label).width) + 14));
}

function withAlpha(value: string, alpha: number): string {
  const numbers = value.match(/[\d.]+/g) ?? ["0", "0", "0"];
  return `rgba(${numbers.slice(0, 3).join(", ")}, ${alpha})`;
}

function timeLabel(unix_s: number): string {
  const date = new Date(unix_s * 1000);
  const two = (value: number) => String(value).padStart(2, "0");
  const text = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return date.getSeconds() ? `${text}:${two(date.getSeconds())}` : text;
}

const FINE_POINTS = 120;
const COARSE_POINTS = 360;

export class Charts {
  private readonly charts: Chart[];
  private range: "fine" | "coarse" = "fine";
  private fields: string[] = [];
  private fine: Row[] = [];
  private coarse: Row[] = [];
  private steps_s = { fine: 1, coarse: 10 };

  constructor() {
    const sync = uPlot.sync("time");
    this.charts = SPECS.map((spec) => new Chart(spec, sync));
    const container = byId("charts");
    container.append(...this.charts.map((chart) => chart.element));
    byId("range").addEventListener("change", (event) => {
      this.range = (event.target as HTMLInputElement).value === "coarse" ? "coarse" : "fine";
      this.draw();
    });
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(container);
  }

  reset(history: Snapshot["history"]): void {
    [this.fields, this.fine, this.coarse] = [history.fields, history.fine, history.coarse];
    this.steps_s = { fine: history.fine_s, coarse: history.coarse_s };
    this.draw();
  }

  add(fine: Row[], coarse: Row[]): void {
    this.fine = [...this.fine, ...fine].slice(-FINE_POINTS);
    this.coarse = [...this.coarse, ...coarse].slice(-COARSE_POINTS);
    if (fine.length) this.draw();
  }

  latest(field: string): number | null {
    return this.fine.at(-1)?.[this.fields.indexOf(field)] ?? null;
  }

  /** Draw again in the colours of a changed theme. */
  recolour(): void {
    this.charts.forEach((chart) => chart.create());
  }

  private draw(): void {
    // An hour of ten-second points ends with the seconds since the last of them.
    const last = this.coarse.at(-1)?.[0] ?? 0;
    const rows = this.range === "fine" ? this.fine : [...this.coarse, ...this.fine.filter((row) => (row[0] ?? 0) > (last ?? 0)).slice(-1)];
    this.charts.forEach((chart) => chart.draw(this.fields, rows, this.steps_s[this.range]));
  }
}
