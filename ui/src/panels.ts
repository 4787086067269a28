// The parts of the page without state of their own: verdict, tiles, alerts, routes, queue, prefixes, scaling.
import type { Charts } from "./charts";
import { byId, el, fill, meter, setText, table } from "./dom";
import { ago, clock, count, decimal, ms, NONE, percent, plural, rate, seconds } from "./format";
import type { Alert, ClientError, Finding, Sections, Sums } from "./types";

const CACHE_POLICIES = ["price", "overlap", "approximate"];

export function showRouter(sections: Sections): void {
  const { router, nodes } = sections;
  const uptime = seconds(Math.max(0, Date.now() / 1000 - router.started));
  setText(byId("router-facts"), `${router.version} (${router.build}) · policy ${router.policy} · ${plural(nodes.length, "node")} · up ${uptime}`);
}

// Does the router help?

export function verdict(window: Sums, policy: string): string {
  const { saved_s, round_robin_saved_s: random_s, prompt_tokens, cached_tokens } = window;
  const span = `In the last ${seconds(window.seconds)}`;
  if (!prompt_tokens) {
    if (!CACHE_POLICIES.includes(policy)) return `No: the policy ${policy} does not look at caches. Set routing.policy = "price".`;
    return window.requests
      ? `Not measured: ${span.toLowerCase()} no prompt was long enough to look up, or no node reported its tokens.`
      : `No data yet: ${span.toLowerCase()} no request was completed.`;
  }
  const gpus = (value: number) => gpuCount(value / Math.max(1, window.seconds));
  const facts = `${span}, ${percent(cached_tokens / prompt_tokens)} of ${count(prompt_tokens)} prompt tokens were cached, which saved ${seconds(saved_s)} of prefill: the work of ${gpus(saved_s)}.`;
  const more_s = saved_s - random_s;
  if (more_s > 0.05 * Math.max(saved_s, 1e-9) && more_s > 0) {
    return `Yes. ${facts} Round robin would have saved an estimated ${seconds(random_s)}, so routing adds ${gpus(more_s)}.`;
  }
  return `Hardly. ${facts} Round robin would have saved about as much, by estimate: prompts share little beyond what every node has cached, or all nodes have it.`;
}

function gpuCount(value: number): string {
  return value < 0.995 ? `${percent(value)} of a GPU` : `${decimal(value)} ${value < 1.05 ? "GPU" : "GPUs"}`;
}

export function showOverview(sections: Sections, charts: Charts): void {
  const { window, queue, nodes } = sections;
  setText(byId("verdict"), verdict(window, sections.router.policy));
  showAdvice(sections);
  const now = (field: string) => charts.latest(field) ?? 0;
  const up = nodes.filter((node) => node.state === "up").length;
  const draining = nodes.filter((node) => node.state === "draining").length;
  const rejected = queue.rows.reduce((sum, row) => sum + row.rejected, 0);
  const gpus = (value: number) => decimal(value / Math.max(1, window.seconds));
  fill(
    byId("tiles"),
    tile("Prompt tokens cached", percent(window.hit_ratio), `round robin, estimated: ${percent(window.round_robin_hit_ratio)}`, [
      meter(window.hit_ratio ?? 0, "c0"),
      meter(window.round_robin_hit_ratio ?? 0, "c7"),
    ]),
    tile("GPUs of prefill saved", gpus(window.saved_s), `round robin, estimated: ${gpus(window.round_robin_saved_s)}`, [
      meter(window.saved_s ? 1 : 0, "c2"),
      meter(window.saved_s ? window.round_robin_saved_s / window.saved_s : 0, "c7"),
    ]),
    tile("Time to first token", ms(window.ttft_p50_ms), window.requests && window.ttft_p50_ms === null ? "no response was streamed" : `p90: ${ms(window.ttft_p90_ms)}`),
    tile("Total time", ms(window.duration_p50_ms), `p90: ${ms(window.duration_p90_ms)}; per output token: ${tokenTime(window)}`),
    tile("Requests per second", rate(now("requests_per_s")), `${count(now("in_flight"))} running, ${count(window.requests)} in ${seconds(window.seconds)}`),
    tile("Waiting in the router", count(queue.waiting), `${count(rejected)} rejected in ${seconds(window.seconds)}`, [], rejected > 0 ? "warn-note" : ""),
    tile("Nodes up", `${up} of ${nodes.length}`, draining ? `${draining} draining` : `KV memory ${percent(now("kv_usage"))} used`, [], up + draining < nodes.length ? "bad" : ""),
  );
}

/** Without streams, the time between two tokens is not measured. It is at most a token's share of the total time. */
function tokenTime(sums: Sums): string {
  if (sums.token_p50_ms !== null || sums.token_at_most_ms === null) return ms(sums.token_p50_ms);
  return `≤ ${ms(sums.token_at_most_ms)}`;
}

/** The costliest finding of the prompt doctor, beside what the router saves. */
function showAdvice({ prompts }: Sections): void {
  const finding = prompts.findings[0];
  const advice = byId("advice");
  advice.hidden = !finding || finding.gpus < 0.005;
  if (!finding || advice.hidden) return;
  const text = `${findingTitle(finding)} costs the work of ${gpuCount(finding.gpus)}. ${finding.what_to_do} `;
  fill(advice, el("b", {}, "What to change: "), text, el("a", { href: "#prompts" }, "What prevents reuse?"));
}

function findingTitle(finding: Finding): string {
  const route = [finding.model, finding.route && `route ${finding.route}`].filter(Boolean).join(", ");
  return `${route}: ${finding.what_differs} at ${finding.place} (token ${count(finding.token)})`;
}

function tile(name: string, value: string, note: string, bars: HTMLElement[] = [], kind = ""): HTMLElement {
  return el("div", { class: `tile ${kind}` }, el("dt", {}, name), el("dd", { class: "value" }, value), el("dd", { class: "soft" }, note), bars.length > 0 && el("dd", { class: "bars" }, ...bars));
}

// Alerts.

let shownAlerts = "";
let announcedAlerts: string[] = [];

export function showAlerts(alerts: Alert[]): void {
  const key = JSON.stringify(alerts.map((alert) => [alert.id, alert.severity, alert.title, alert.cause, alert.sources]));
  const container = byId("alerts");
  if (key !== shownAlerts) {
    shownAlerts = key;
    container.replaceChildren(
      ...alerts.map((alert) =>
        el(
          "article",
          { class: `alert ${alert.severity}` },
          el("h2", {}, el("span", { class: "severity" }, alert.severity), " ", alert.title),
          el("p", {}, alert.cause),
          alert.sources.length > 1 && el("p", {}, `From ${sourcesText(alert.sources)}.`),
          el("p", {}, el("b", {}, "What to do: "), alert.what_to_do),
          el("p", { class: "soft since" }),
        ),
      ),
    );
  }
  alerts.forEach((alert, index) => {
    const since = container.children[index]?.querySelector(".since");
    if (since) setText(since, `since ${clock(alert.since)}, ${ago(alert.since)}`);
  });
  // Screen readers hear of an alert once, not whenever a number in it changes.
  const fresh = alerts.filter((alert) => !announcedAlerts.includes(alert.id));
  if (fresh.length) setText(byId("announcement"), fresh.map((alert) => `${alert.severity}: ${alert.title}`).join(". "));
  announcedAlerts = alerts.map((alert) => alert.id);
  document.title = alerts.length ? `(${alerts.length}) Warmroute` : "Warmroute";
}

function sourcesText(sources: { source: string; count: number }[]): string {
  return sources.map((one) => `${one.source} (${count(one.count)})`).join(", ");
}

export function showEndedAlerts(alerts: Alert[]): void {
  const details = byId("ended-alerts");
  details.hidden = !alerts.length;
  const [summary, list] = details.children;
  if (summary) setText(summary, `${plural(alerts.length, "alert")} ended recently`);
  if (list) fill(list, ...alerts.map((alert) => el("li", {}, `${alert.title}: ${clock(alert.since)} to ${clock(alert.ended ?? alert.since)}. `, el("span", { class: "soft" }, alert.cause))));
}

// Tables.

export function showRoutes(sections: Sections): void {
  const rows = sections.routes.filter((route) => route.requests > 0);
  const short = rows.reduce((sum, route) => sum + route.short_reports, 0);
  if (!rows.length) return fill(byId("route-table"), el("p", { class: "soft" }, "No request was completed."));
  fill(
    byId("route-table"),
    table(
      "Models and routes",
      [
        { head: "Model", text: true },
        { head: "Route", text: true },
        { head: "Requests" },
        { head: "Cached", title: "Cached fraction of the prompt tokens" },
        { head: "Est. round robin", title: "An estimate of the cached fraction under round robin" },
        { head: "TTFT", title: "Time to first token of streamed responses: p50 / p90" },
        { head: "Total", title: "Time from arrival to the end of the response: p50 / p90" },
        { head: "Per token", title: "Time between two output tokens, p50. Of responses that are not streamed only an upper limit is known (≤): the total time by the output tokens" },
        { head: "Saved", title: "GPU time of prefill saved" },
      ],
      rows.map((route) => [
        route.model,
        route.route || NONE,
        count(route.requests),
        percent(route.hit_ratio),
        `${percent(route.round_robin_hit_ratio)}${route.short_reports ? " *" : ""}`,
        pair(route.ttft_p50_ms, route.ttft_p90_ms),
        pair(route.duration_p50_ms, route.duration_p90_ms),
        tokenTime(route),
        seconds(route.saved_s),
      ]),
    ),
    short > 0 && el("p", { class: "soft" }, `* Limited: nodes reported ${plural(short, "prompt")} as much shorter than the router expected to be cached. A prompt counts with the tokens that its node reports.`),
  );
}

function pair(p50: number | null, p90: number | null): string {
  return p50 === null ? NONE : `${ms(p50)} / ${ms(p90)}`;
}

export function showTenants({ tenants, queue }: Sections): void {
  const waiting = new Map<string, [number, number]>();
  for (const row of queue.rows) {
    const [waits, rejected] = waiting.get(row.tenant) ?? [0, 0];
    waiting.set(row.tenant, [waits + row.waiting, rejected + row.rejected]);
  }
  const unserved = [...waiting.keys()].filter((tenant) => !tenants.rows.some((row) => row.tenant === tenant));
  const rows = [
    ...tenants.rows,
    ...unserved.map((tenant) => ({ tenant, requests: 0, prompt_tokens: 0, cached_tokens: 0, output_tokens: 0 })),
  ];
  if (!rows.some((row) => row.tenant)) {
    return fill(byId("tenant-table"), el("p", { class: "soft" }, "No request of a tenant was completed. A key in [[keys]] names its tenant."));
  }
  const hidden = tenants.count - tenants.rows.length;
  fill(
    byId("tenant-table"),
    table(
      "Tenants",
      [{ head: "Tenant", text: true }, { head: "Requests" }, { head: "Prompt tokens" }, { head: "Cached", title: "Cached fraction of the prompt tokens" }, { head: "Output tokens" }, { head: "Waiting" }, { head: "Rejected" }],
      rows.map((row) => [
        row.tenant || NONE,
        count(row.requests),
        count(row.prompt_tokens),
        percent(row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : null),
        count(row.output_tokens),
        count(waiting.get(row.tenant)?.[0] ?? 0),
        count(waiting.get(row.tenant)?.[1] ?? 0),
      ]),
    ),
    hidden > 0 && el("p", { class: "soft" }, `and ${plural(hidden, "tenant")} with fewer tokens`),
  );
}

/** Requests that the router rejected because of what the client sent. */
export function showClientErrors(errors: ClientError[]): void {
  const rows = errors.filter((error) => error.total > 0);
  if (!rows.length) return fill(byId("client-errors"), el("p", { class: "soft" }, "Nothing was rejected because of what a client sent."));
  fill(
    byId("client-errors"),
    table(
      "Requests rejected because of what clients sent",
      [{ head: "Code", text: true }, { head: "Status" }, { head: "Last minutes", title: "In the last one to two minutes" }, { head: "Total", title: "Since the start" }, { head: "From", text: true }],
      rows.map((error) => [
        error.code,
        String(error.status),
        count(error.recent),
        count(error.total),
        [sourcesText(error.sources), error.keys.length ? `hash of key: ${error.keys.map((key) => `${key.key_sha256} (${count(key.count)})`).join(", ")}` : ""].filter(Boolean).join("; ") || NONE,
      ]),
    ),
  );
}

/** The last reload: when, what it changed, or why it failed. */
export function showConfiguration(router: Sections["router"]): void {
  const { last_reload: last, build } = router;
  const body = byId("configuration-body");
  const interpreted = build === "interpreted" && el("p", { class: "soft" }, "This is the interpreted build: a request takes 1.2 to 1.8 times the CPU of the compiled one, which WARMROUTE_COMPILE=1 pip install . installs.");
  if (!last) return fill(body, el("p", { class: "soft" }, `Not reloaded since the start at ${clock(router.started)}.`), interpreted);
  const checked = last.checked > last.time ? ` Found unchanged at ${clock(last.checked)}.` : "";
  fill(
    body,
    last.error === null
      ? el("p", {}, el("span", { class: "chip up" }, "reloaded"), ` at ${clock(last.time)} (${last.reason}).${checked}`)
      : el("p", {}, el("span", { class: "chip down" }, "failed"), ` The reload at ${clock(last.time)} (${last.reason}) failed. The router keeps the previous configuration.`),
    last.error !== null && el("p", { class: "bad" }, last.error),
    last.error === null && (last.changed.length ? el("ul", {}, ...last.changed.map((change) => el("li", {}, change))) : el("p", { class: "soft" }, "Nothing had changed.")),
    last.needs_restart.length > 0 && el("p", {}, el("b", {}, "Takes effect after a restart: "), last.needs_restart.join(", ")),
    interpreted,
  );
}

export function showQueue(sections: Sections): void {
  const { rows, queued_total } = sections.queue;
  if (!rows.length) {
    const text = `Nothing waits, and nothing was rejected. ${plural(queued_total, "request")} had to wait since the start.`;
    return fill(byId("queue-table"), el("p", { class: "soft" }, text));
  }
  fill(
    byId("queue-table"),
    table(
      "Queue and rejections by priority and tenant",
      [{ head: "Priority", text: true }, { head: "Tenant", text: true }, { head: "Waiting" }, { head: "Longest" }, { head: "Rejected" }, { head: "Reasons", text: true }],
      rows.map((row) => [
        row.priority,
        row.tenant || NONE,
        count(row.waiting),
        row.waiting ? seconds(row.oldest_s) : NONE,
        count(row.rejected),
        Object.entries(row.reasons).map(([reason, times]) => `${reason} ${count(times)}`).join(", ") || NONE,
      ]),
    ),
  );
}

export function showPrefixes(sections: Sections): void {
  if (!sections.prefixes.length) {
    return fill(byId("prefix-table"), el("p", { class: "soft" }, "No prefix is shared by several prompts of the last minute."));
  }
  const nodes = sections.nodes.length;
  fill(
    byId("prefix-table"),
    table(
      "Hot prefixes",
      [{ head: "Prefix", text: true }, { head: "Tokens" }, { head: "Share of prompts" }, { head: "Sent by", text: true }, { head: "Cached on", text: true }],
      sections.prefixes.map((prefix) => [
        el("code", {}, prefix.id),
        count(prefix.tokens),
        el("span", {}, meter(prefix.share, "c0"), percent(prefix.share)),
        [prefix.model, prefix.route && `route ${prefix.route}`, prefix.tenant && `tenant ${prefix.tenant}`].filter(Boolean).join(", ") || NONE,
        prefix.holder_count > prefix.holders.length || prefix.holder_count === nodes
          ? `${prefix.holder_count} of ${nodes} nodes`
          : prefix.holders.join(", ") || "no node",
      ]),
    ),
  );
}

export function showPrompts(sections: Sections): void {
  const { findings, routes } = sections.prompts;
  const body = byId("prompts-body");
  const cannot = routes.filter((route) => route.unavailable);
  const names = cannot.map((route) => [route.model, route.route && `route ${route.route}`].filter(Boolean).join(", ")).join("; ");
  const unavailable = cannot.length ? `${names}: ${cannot[0]?.unavailable ?? ""}` : "";
  if (!findings.length) {
    const samples = routes.reduce((sum, route) => sum + route.samples, 0);
    const text = samples ? `Nothing found in ${plural(samples, "sampled prompt")}: prompts differ where their common text ends.` : unavailable ? "" : "No prompt was sampled yet.";
    return fill(body, text && el("p", { class: "soft" }, text), unavailable && el("p", {}, unavailable));
  }
  fill(
    body,
    ...findings.map((finding) =>
      el(
        "article",
        { class: "finding" },
        el("h3", {}, findingTitle(finding)),
        el("p", {}, `${percent(finding.share)} of the prompts differ there, before text that they have in common. Of the route's prompt tokens, ${percent(finding.cached_share)} were cached and ${percent(finding.could_share)} could be. Lost since ${clock(finding.since)}: ${seconds(finding.lost_gpu_s)} of GPU time, now the work of ${gpuCount(finding.gpus)}.`),
        el("p", { class: "excerpt" }, el("code", {}, finding.excerpt.before, el("mark", {}, finding.excerpt.values[0] ?? ""), finding.excerpt.after)),
        el("p", {}, el("b", {}, "What to do: "), finding.what_to_do),
      ),
    ),
  );
}

export function showScaling(sections: Sections): void {
  const scaling = sections.scaling;
  const body = byId("scaling-body");
  if (!scaling.enabled) return fill(body, el("p", { class: "soft" }, "The router does not scale this fleet ([scaling] in the configuration)."));
  const last = scaling.last_decision;
  const starting = (scaling.nodes ?? []).filter((node) => node.state !== "serving");
  const errors = Object.entries(scaling.errors ?? {});
  fill(
    body,
    el(
      "p",
      {},
      last ? `${last.nodes} of ${scaling.desired_nodes} desired nodes; the load takes ${percent(last.utilisation)} of their time. ` : "No decision yet. ",
      last?.panicking ? "Panic mode: the load rises fast. " : "",
      scaling.dry_run ? "Dry run: decisions are not executed. " : "",
      scaling.leading === false ? "Another router process scales the fleet. " : "",
    ),
    last?.reasons.length ? el("ul", {}, ...last.reasons.map((reason) => el("li", {}, reason))) : null,
    errors.length ? el("ul", { class: "bad" }, ...errors.map(([name, error]) => el("li", {}, `${name}: ${error}`))) : null,
    starting.length
      ? table(
          "Nodes that start or stop",
          [{ head: "Node", text: true }, { head: "State", text: true }, { head: "For" }, { head: "Offer", text: true }, { head: "Reason", text: true }],
          starting.map((node) => [node.node || "(starting)", node.state, seconds(node.state_age_s), node.offer, node.reason || NONE]),
        )
      : null,
    el("h3", {}, "Changes"),
    scaling.changes.length
      ? table(
          "Changes of the fleet's size",
          [{ head: "Time", text: true }, { head: "Nodes" }, { head: "Desired" }, { head: "Reasons", text: true }],
          scaling.changes.map((change) => [clock(change.time), String(change.nodes), String(change.desired_nodes), change.reasons.join("; ") || NONE]),
        )
      : el("p", { class: "soft" }, "None yet."),
  );
}
