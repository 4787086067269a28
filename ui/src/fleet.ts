// The nodes by island. Rows are kept and updated in place, so that focus and scrolling stay where they are.
import { byId, el, headCell, meter, setText } from "./dom";
import { count, ms, NONE, percent, plural, rate } from "./format";
import type { Alert, LiveNode, Sections } from "./types";

const STATES: Record<LiveNode["state"], string> = {
  up: "up",
  down: "down",
  half_open: "half open",
  ejected: "ejected",
  unknown: "not checked",
  draining: "draining",
};
const SEVERITY: Record<LiveNode["state"], number> = {
  down: 5, half_open: 4, ejected: 3, unknown: 2, draining: 1, up: 0,
};
const CACHES: Record<LiveNode["cache"], [string, string]> = {
  events: ["KV events", "The router follows the engine's KV events and missed none."],
  incomplete: ["events, partial", "The router receives KV events, but does not know everything in the cache yet."],
  missing: ["no events", "The engine prefilled prompts and sent no KV events."],
  mismatch: ["other tokens", "The engine's tokens differ from the router's, so its KV events match no prompt."],
  inferred: ["inferred", "The router infers the cache from the requests that it sent."],
};
const COLUMNS = [
  { head: "Node", text: true },
  { head: "State", text: true },
  { head: "Requests", title: "Requests on the node: of this router, and of others" },
  { head: "Engine queue", title: "Requests in the engine's own queue, as last polled" },
  { head: "KV memory", title: "Fraction of the KV blocks that running requests use" },
  { head: "Prefill /1k", title: "Learned time to prefill 1,000 tokens, and how it compares with the median node" },
  { head: "Backlog", title: "Prefill time of the requests that wait for their first token" },
  { head: "Failed", title: "Requests that failed, broke off or met a busy node, since the start" },
  { head: "Cache", text: true },
  { head: "Action", text: true },
];

class NodeRow {
  readonly element: HTMLTableRowElement;
  private readonly cells: HTMLElement[];
  private readonly state = el("span", { class: "chip" });
  private readonly trouble = el("span", { class: "trouble" });
  private readonly load = el("span");
  private readonly loadBar = meter(0);
  private readonly kv = el("span");
  private readonly kvBar = meter(0);
  private readonly button: HTMLButtonElement;
  node: LiveNode;

  constructor(node: LiveNode, drain: (node: LiveNode) => void) {
    this.node = node;
    this.button = el("button", { type: "button", class: "small" }, "Drain");
    this.button.addEventListener("click", () => drain(this.node));
    const cells = COLUMNS.map((column, index) =>
      el(index === 0 ? "th" : "td", {
        scope: index === 0 ? "row" : undefined,
        class: column.text ? "text" : undefined,
        "data-head": column.head,
      }),
    );
    this.cells = cells;
    cells[0]?.append(node.name);
    cells[1]?.append(this.state, this.trouble);
    cells[2]?.append(this.loadBar, this.load);
    cells[4]?.append(this.kvBar, this.kv);
    cells[9]?.append(this.button);
    this.element = el("tr", {}, ...cells);
  }

  update(node: LiveNode, mostRequests: number, medianPrefill: number, alerts: Alert[]): void {
    this.node = node;
    const requests = node.in_flight + node.other;
    this.state.className = `chip ${node.state}`;
    setText(this.state, STATES[node.state]);
    this.state.title = node.reason;
    const texts = alerts.map((alert) => alert.title.replace(/^.*?: /, ""));
    setText(this.trouble, node.state === "up" ? texts.join("; ") : node.state === "draining" ? "" : node.reason);
    this.element.classList.toggle("in-trouble", alerts.length > 0 || SEVERITY[node.state] > 1);
    setText(this.load, node.other ? `${rate(requests)} (${rate(node.other)} other)` : rate(requests));
    setWidth(this.loadBar, requests / Math.max(1, mostRequests), "c0");
    this.set(3, node.waiting ? count(node.waiting) : "0");
    setText(this.kv, percent(node.kv_usage));
    setWidth(this.kvBar, node.kv_usage, node.kv_usage >= 0.95 ? "bad" : node.kv_usage >= 0.85 ? "warn" : "c2");
    const factor = medianPrefill > 0 ? node.prefill_us / medianPrefill : 1;
    this.set(5, `${ms(node.prefill_us)}${factor >= 1.5 || factor <= 0.67 ? ` (×${factor.toFixed(1)})` : ""}`);
    this.set(6, node.backlog_ms ? ms(node.backlog_ms) : NONE);
    this.set(7, count(node.failed));
    const [short, long] = CACHES[node.cache];
    this.set(8, short);
    const cell = this.cells[8];
    if (cell) cell.title = `${long}${node.agreement === null ? "" : ` Predictions agree with reports to ${percent(node.agreement)}.`}`;
    const word = node.state === "draining" ? "Undrain" : "Drain";
    setText(this.button, word);
    this.button.setAttribute("aria-label", `${word} ${node.name}`);
  }

  private set(index: number, text: string): void {
    const cell = this.cells[index];
    if (cell) setText(cell, text);
  }
}

function setWidth(bar: HTMLElement, share: number, kind: string): void {
  const inner = bar.firstElementChild as HTMLElement;
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  inner.className = kind;
}

const ORDERS: Record<string, (a: NodeRow, b: NodeRow) => number> = {
  name: byName,
  load: (a, b) => b.node.in_flight + b.node.other - a.node.in_flight - a.node.other,
  kv: (a, b) => b.node.kv_usage - a.node.kv_usage,
  trouble: (a, b) =>
    SEVERITY[b.node.state] - SEVERITY[a.node.state] ||
    Number(b.element.classList.contains("in-trouble")) - Number(a.element.classList.contains("in-trouble")) ||
    byName(a, b),
};

function byName(a: NodeRow, b: NodeRow): number {
  return a.node.name.localeCompare(b.node.name, undefined, { numeric: true });
}

/** Of a larger island, only the first nodes are shown until the reader asks for all. */
const MAX_CLOSED = 10;
const SHOWN_CLOSED = 8;

export class Fleet {
  private readonly rows = new Map<string, NodeRow>();
  private readonly filter = byId<HTMLInputElement>("node-filter");
  private readonly sort = byId<HTMLSelectElement>("node-sort");
  private sections: Sections | null = null;
  private layout = "";
  private readonly opened = new Set<string>();

  constructor(private readonly drain: (node: LiveNode) => void) {
    this.filter.addEventListener("input", () => this.render());
    this.sort.addEventListener("change", () => this.render());
  }

  show(sections: Sections): void {
    this.sections = sections;
    this.render();
  }

  private render(): void {
    if (!this.sections) return;
    const { nodes, islands, alerts } = this.sections;
    const names = new Set(nodes.map((node) => node.name));
    for (const name of this.rows.keys()) if (!names.has(name)) this.rows.delete(name);
    const most = Math.max(8, ...nodes.map((node) => node.in_flight + node.other));
    const prefills = nodes.map((node) => node.prefill_us).sort((a, b) => a - b);
    const median = prefills[Math.floor(prefills.length / 2)] ?? 0;
    for (const node of nodes) {
      let row = this.rows.get(node.name);
      if (!row || row.node.island !== node.island) this.rows.set(node.name, (row = new NodeRow(node, this.drain)));
      row.update(node, most, median, alerts.filter((alert) => alert.nodes.includes(node.name)));
    }
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = [...this.rows.values()].filter(({ node }) =>
      [node.name, node.island, STATES[node.state], ...node.models].some((text) => text.toLowerCase().includes(wanted)),
    );
    const sections = [...new Set([...islands.map((island) => island.name), ...nodes.map((node) => node.island)])];
    const groups = sections.map((island) => shown.filter((row) => row.node.island === island).sort(ORDERS[this.sort.value] ?? ORDERS.name));
    const empty = byId("fleet-empty");
    empty.hidden = shown.length > 0;
    setText(empty, nodes.length ? "No node matches the filter." : "The fleet has no nodes. Add [[nodes]] to the configuration.");
    this.place(sections, groups, islands);
  }

  /** Build the tables again only if nodes came, left or changed places. */
  private place(names: string[], groups: NodeRow[][], islands: Sections["islands"]): void {
    const filtering = this.filter.value.trim() !== "";
    const closed = groups.map((rows, index) => rows.length > MAX_CLOSED && !filtering && !this.opened.has(names[index] ?? ""));
    const layout = JSON.stringify([groups.map((rows) => rows.map((row) => row.node.name)), closed]);
    const heads = names.map((name, index) => {
      const rows = groups[index] ?? [];
      const up = rows.filter((row) => row.node.state === "up").length;
      const requests = rows.reduce((sum, row) => sum + row.node.in_flight + row.node.other, 0);
      const distance = islands.find((island) => island.name === name)?.distance_ms ?? 0;
      const parts = [`${up} of ${plural(rows.length, "node")} up`, plural(requests, "request"), distance >= 1 ? `${ms(distance)} away` : ""];
      return [name || (names.length > 1 ? "no island" : "all nodes"), parts.filter(Boolean).join(", ")] as const;
    });
    const container = byId("islands");
    if (layout !== this.layout) {
      this.layout = layout;
      const focused = document.activeElement;
      container.replaceChildren(
        ...groups.map((rows, index) => {
          const label = `Nodes: ${heads[index]?.[0]}`;
          const table = el(
            "table",
            { class: "nodes", "aria-label": label },
            el("thead", {}, el("tr", {}, ...COLUMNS.map((column) => headCell(column)))),
            el("tbody", {}, ...(closed[index] ? rows.slice(0, SHOWN_CLOSED) : rows).map((row) => row.element)),
          );
          const more = el("button", { type: "button", class: "small more", hidden: !closed[index] }, `Show all ${rows.length} nodes`);
          more.addEventListener("click", () => {
            this.opened.add(names[index] ?? "");
            this.render();
            rows[SHOWN_CLOSED]?.element.querySelector("button")?.focus();
          });
          const head = el("h3", { class: "island" }, el("span"), el("span", { class: "soft" }));
          const scroll = el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": label }, table);
          return el("div", { hidden: rows.length === 0 }, head, scroll, more);
        }),
      );
      if (focused instanceof HTMLElement && container.contains(focused)) focused.focus();
    }
    heads.forEach(([name, facts], index) => {
      const head = container.children[index]?.querySelector("h3");
      if (!head?.children[0] || !head.children[1]) return;
      setText(head.children[0], name);
      setText(head.children[1], ` ${facts}`);
    });
  }
}
