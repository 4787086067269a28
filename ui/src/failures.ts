// Requests that no node completed, and the search for requests by id, tenant and status.
import { decisionBody, disclosure, triesTable } from "./decisions";
import { byId, el, setText } from "./dom";
import { authorization, errorMessage } from "./feed";
import { clock, ms, plural } from "./format";
import type { Decision, Ended, FailedRequest } from "./types";

const MAX_FOUND = 50;

export class Failures {
  private readonly form = byId<HTMLFormElement>("search");
  private readonly list = byId("failed-list");
  private readonly note = byId("failures-note");
  private readonly clear = byId<HTMLButtonElement>("search-clear");
  private latest: FailedRequest[] = [];
  private journal = true;
  private searching = false;

  constructor() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.search();
    });
    this.clear.addEventListener("click", () => {
      this.form.reset();
      this.searching = false;
      this.clear.hidden = true;
      this.render();
    });
  }

  show(latest: FailedRequest[], journal: boolean): void {
    [this.latest, this.journal] = [latest, journal];
    if (!this.searching) this.render();
  }

  private render(): void {
    const none = this.journal ? "No request has failed." : "The journal is off: set journal.max_decisions.";
    setText(this.note, this.latest.length ? "The latest that no node completed. Open one to see why each node failed." : none);
    const opened = new Set(Array.from(this.list.querySelectorAll("details[open]"), (one) => (one as HTMLElement).dataset.id));
    const focused = this.list.contains(document.activeElement) ? (document.activeElement?.parentElement?.dataset.id ?? "") : null;
    this.list.replaceChildren(
      ...this.latest.map((request) => {
        const row = disclosure(summaryOf(request, request.time), () => [factsOf(request), ...triesTable(request.failed_tries)]);
        row.dataset.id = request.request_id;
        row.open = opened.has(request.request_id);
        return row;
      }),
    );
    if (focused) this.list.querySelector<HTMLElement>(`[data-id="${CSS.escape(focused)}"] summary`)?.focus();
  }

  private async search(): Promise<void> {
    const fields = new FormData(this.form);
    const query = new URLSearchParams({ limit: String(MAX_FOUND), failed: fields.has("failed") ? "1" : "0" });
    for (const name of ["request_id", "tenant", "status"]) {
      const value = String(fields.get(name) ?? "").trim();
      if (value) query.set(name, value);
    }
    this.searching = true;
    this.clear.hidden = false;
    setText(this.note, "Searching …");
    try {
      const response = await fetch(`/admin/decisions?${query}`, { headers: authorization(), cache: "no-store" });
      if (!response.ok) throw new Error(await errorMessage(response));
      const found = (await response.json()).decisions as Decision[];
      setText(this.note, `${found.length >= MAX_FOUND ? "The latest " : ""}${plural(found.length, "request")} found.`);
      this.list.replaceChildren(...found.map((one) => disclosure(summaryOf(one, Date.parse(one.time) / 1000), () => decisionBody(one))));
    } catch (error) {
      this.list.replaceChildren();
      setText(this.note, `The search failed: ${error instanceof Error ? error.message : String(error)}`);
    }
  }
}

function summaryOf(request: Ended, time_s: number): HTMLElement {
  const last = request.failed_tries.at(-1);
  const cause = [last?.error && last.error.class !== "other" ? last.error.class.replaceAll("_", " ") : "", last?.error?.type, last?.error?.code]
    .filter(Boolean)
    .join(", ");
  const why = last ? `${last.node}: ${last.reason}${cause ? ` (${cause})` : ""}` : request.node;
  const sender = [request.tenant, request.model, request.route && `route ${request.route}`].filter(Boolean).join(", ");
  return el(
    "summary",
    {},
    el("time", { datetime: new Date(time_s * 1000).toISOString() }, clock(time_s)),
    el("span", { class: `chip ${request.outcome === "ok" ? "up" : "down"}` }, request.status ? `${request.outcome} ${request.status}` : request.outcome),
    el("code", {}, request.request_id),
    el("span", { class: "why" }, why),
    el("span", { class: "soft right" }, sender),
  );
}

function factsOf(request: FailedRequest): HTMLElement {
  const facts: [string, string][] = [
    ["Request", request.request_id],
    ["Tenant", request.tenant],
    ["Model", request.model],
    ["Route", request.route],
    ["Nodes tried", String(request.attempts)],
    ["Last node", request.node],
    ["Duration", request.duration_ms === null ? "" : ms(request.duration_ms)],
  ];
  return el("dl", { class: "facts" }, ...facts.filter(([, value]) => value).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}
