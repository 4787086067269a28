// The parts of the page without state of their own: verdict, tiles, alerts, routes, queue, prefixes, scaling.
import type { Charts } from "./charts";
import { byId, el, fill, meter, setText, table } from "./dom";
import { ago, clock, count, decimal, ms, NONE, percent, plural, rate, seconds } from "./format";
import type { Alert, Finding, Sections, Sums } from "./types";

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
    tile("Time to first token", ms(window.ttft_p50_ms), `p90: ${ms(window.ttft_p90_ms)}`),
    tile("Requests per second", rate(now("requests_per_s")), `${count(now("in_flight"))} running, ${count(window.requests)} in ${seconds(window.seconds)}`),
    tile("Waiting in the router", count(queue.waiting), `${count(rejected)} rejected in ${seconds(window.seconds)}`, [], rejected > 0 ? "warn-note" : ""),
    tile("Nodes up", `${up} of ${nodes.length}`, draining ? `${draining} draining` : `KV memory ${percent(now("kv_usage"))} used`, [], up + draining < nodes.length ? "bad" : ""),
  );
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
  const key = JSON.stringify(alerts.map((alert) => [alert.id, alert.severity, alert.title, alert.cause]));
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

// Tables.

export function showRoutes(sections: Sections): void {
  const rows = sections.routes.filter((route) => route.requests > 0);
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
        { head: "TTFT p50" },
        { head: "p90" },
        { head: "Saved", title: "GPU time of prefill saved" },
      ],
      rows.map((route) => [
        route.model,
        route.route || NONE,
        count(route.requests),
        percent(route.hit_ratio),
        percent(route.round_robin_hit_ratio),
        ms(route.ttft_p50_ms),
        ms(route.ttft_p90_ms),
        seconds(route.saved_s),
      ]),
    ),
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
