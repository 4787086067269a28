// Recent decisions. Each opens to the prices of its candidates, as stacked bars with one part for each term.
import { byId, el, fill, table } from "./dom";
import { clock, count, ms, NONE, percent, plural } from "./format";
import type { Candidate, Decision, FailedTry } from "./types";

const MAX_SHOWN = 20;
const TERM_COLOURS: Record<string, string> = {
  wait: "c1",
  prefill: "c0",
  room: "c3",
  contention: "c6",
  distance: "c2",
  adapter: "c5",
  risk: "bad",
  memory: "c4",
  congestion: "c7",
};

export class Decisions {
  private readonly list = byId("decision-list");
  private readonly button = byId<HTMLButtonElement>("new-decisions");
  private pending: Decision[] = [];
  private journal = true;

  constructor() {
    this.button.addEventListener("click", () => this.insert());
  }

  reset(decisions: Decision[], journal: boolean): void {
    this.journal = journal;
    this.list.replaceChildren();
    this.pending = decisions;
    this.insert();
  }

  add(decisions: Decision[]): void {
    this.pending = [...this.pending, ...decisions].slice(-MAX_SHOWN);
    // Rows must not move away under the reader's pointer or focus.
    const reading = this.list.matches(":hover") || this.list.contains(document.activeElement) || this.list.querySelector("details[open]");
    if (!reading) this.insert();
    else if (this.pending.length) {
      this.button.hidden = false;
      this.button.textContent = `Show ${plural(this.pending.length, "new decision")}`;
    }
  }

  private insert(): void {
    this.button.hidden = true;
    this.list.querySelector("p")?.remove();
    this.list.prepend(...this.pending.reverse().map(decisionRow));
    this.pending = [];
    while (this.list.children.length > MAX_SHOWN) this.list.lastElementChild?.remove();
    if (!this.list.children.length) {
      const text = this.journal ? "No request has been sent to a node yet." : "The journal is off: set journal.max_decisions.";
      this.list.append(el("p", { class: "soft" }, text));
    }
  }
}

function decisionRow(decision: Decision): HTMLElement {
  const cached = decision.prompt_tokens ? (decision.cached_tokens ?? 0) / decision.prompt_tokens : null;
  const good = decision.outcome === "ok";
  const summary = el(
    "summary",
    {},
    el("time", { datetime: decision.time }, clock(Date.parse(decision.time) / 1000)),
    el("span", { class: `chip ${good ? "up" : "down"}` }, good ? percent(cached) : decision.outcome),
    el("span", { class: "why" }, decision.explanation),
    el("span", { class: "soft right" }, decision.duration_ms === null ? "" : ms(decision.duration_ms)),
  );
  return disclosure(summary, () => decisionBody(decision));
}

/** A row that opens. What is in it is built when it is opened first. */
export function disclosure(summary: HTMLElement, contents: () => Node[]): HTMLDetailsElement {
  const body = el("div", { class: "decision" });
  const details = el("details", {}, summary, body);
  details.addEventListener("toggle", () => {
    if (details.open && !body.firstChild) fill(body, ...contents());
  });
  return details;
}

export function decisionBody(decision: Decision): Node[] {
  const { reported } = decision;
  const facts: [string, string][] = [
    ["Request", decision.request_id],
    ["Model", decision.model],
    ["Route", decision.route],
    ["Tenant", decision.tenant],
    ["Priority", decision.priority],
    ["Prompt", decision.prompt_tokens === null ? "not tokenized" : plural(decision.prompt_tokens, "token")],
    ["Cached, predicted", decision.cached_tokens === null ? "" : count(decision.cached_tokens)],
    ["Cached, reported", reported.cached_tokens === null ? "not reported" : count(reported.cached_tokens)],
    ["Prompt, reported", reported.prompt_tokens !== null && reported.prompt_tokens < (decision.cached_tokens ?? 0) ? `${plural(reported.prompt_tokens, "token")}; estimates count no more` : ""],
    ["Output", reported.output_tokens === null ? "" : plural(reported.output_tokens, "token")],
    ["Queued", decision.queued_ms >= 1 ? ms(decision.queued_ms) : ""],
    ["First token", decision.ttft_ms === null ? "" : ms(decision.ttft_ms)],
    ["Duration", decision.duration_ms === null ? "" : ms(decision.duration_ms)],
    ["Nodes tried", decision.attempts > 1 ? String(decision.attempts) : ""],
    ["Outcome", `${decision.outcome}${decision.status ? `, status ${decision.status}` : ""}`],
  ];
  const list = el("dl", { class: "facts" }, ...facts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const before = [list, ...triesTable(decision.failed_tries)];
  if (!decision.candidates.length) return [...before, el("p", { class: "soft" }, "The policy that decided has no prices.")];
  const highest = Math.max(...decision.candidates.map((candidate) => candidate.total_ms), 1e-9);
  const terms = Object.keys(TERM_COLOURS).filter((term) => decision.candidates.some((one) => (one.terms_ms[term] ?? 0) > 0));
  const keys = terms.map((term) => el("li", {}, el("span", { class: `key ${TERM_COLOURS[term]}`, "aria-hidden": "true" }), term));
  const hidden = decision.candidate_count - decision.candidates.length;
  return [
    ...before,
    el("h3", {}, "Price of each candidate, in milliseconds"),
    el("ul", { class: "legend" }, ...keys),
    el("ul", { class: "prices", "aria-label": "Candidates, the cheapest first" }, ...decision.candidates.map((one) => priceBar(one, highest, terms))),
    ...(hidden > 0 ? [el("p", { class: "soft" }, `and ${plural(hidden, "more expensive candidate")}`)] : []),
  ];
}

const CLASSES: Record<string, string> = {
  out_of_memory: "out of memory",
  bad_template: "bad template",
  unknown_model: "unknown model",
};

/** Why each node failed. Nothing of the error's text is in it, unless journal.error_text is set. */
export function triesTable(tries: FailedTry[]): Node[] {
  if (!tries.length) return [];
  const columns = ["Node", "Role", "Status", "Class", "Type", "Code", "Length", "After", "Reason"];
  const numbers = ["Status", "Length", "After"];
  const rows = tries.map((one) => [
    one.node,
    one.role,
    one.status === null ? NONE : String(one.status),
    one.error ? (CLASSES[one.error.class] ?? one.error.class) : NONE,
    one.error?.type || NONE,
    one.error?.code || NONE,
    one.error ? `${count(one.error.length)} bytes` : NONE,
    one.duration_ms === null ? NONE : ms(one.duration_ms),
    one.error?.text ? `${one.reason}: ${one.error.text}` : one.reason,
  ]);
  return [el("h3", {}, "Failed tries"), table("Failed tries", columns.map((head) => ({ head, text: !numbers.includes(head) })), rows)];
}

function priceBar(candidate: Candidate, highest: number, terms: string[]): HTMLElement {
  const parts = terms.filter((term) => (candidate.terms_ms[term] ?? 0) > 0);
  const segments = parts.map((term) => {
    const value = candidate.terms_ms[term] ?? 0;
    const segment = el("i", { class: TERM_COLOURS[term], title: `${term}: ${ms(value)}` });
    segment.style.width = `${(value / highest) * 100}%`;
    return segment;
  });
  const spoken = parts.map((term) => `${term} ${ms(candidate.terms_ms[term] ?? 0)}`).join(", ");
  return el(
    "li",
    { class: candidate.chosen ? "chosen" : undefined },
    el("span", { class: "name" }, candidate.node, candidate.chosen ? el("span", { class: "chip up" }, "chosen") : null),
    el("span", { class: "stack", role: "img", "aria-label": spoken || "no cost" }, ...segments),
    el("span", { class: "total" }, ms(candidate.total_ms)),
    el("span", { class: "soft" }, `${count(candidate.cached_tokens)} cached, ${count(candidate.new_tokens)} new`),
  );
}
