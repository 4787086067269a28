// The JSON of GET /admin/live (src/warmroute/app/live_page.py).

export interface Sums {
  seconds: number;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  hit_ratio: number | null;
  round_robin_hit_ratio: number | null;
  ttft_p50_ms: number | null;
  ttft_p90_ms: number | null;
  duration_p50_ms: number | null;
  duration_p90_ms: number | null;
  token_p50_ms: number | null;
  token_p90_ms: number | null;
  token_at_most_ms: number | null;
  short_reports: number;
  saved_s: number;
  round_robin_saved_s: number;
}

export interface LiveNode {
  name: string;
  island: string;
  models: string[];
  engine: string;
  state: "up" | "down" | "half_open" | "ejected" | "unknown" | "draining";
  reason: string;
  in_flight: number;
  other: number;
  waiting: number;
  kv_usage: number;
  kv_tokens: number;
  prefill_us: number;
  backlog_ms: number;
  latency_ms: number;
  cache: "events" | "incomplete" | "missing" | "mismatch" | "inferred";
  agreement: number | null;
  ok: number;
  failed: number;
}

export interface Alert {
  id: string;
  severity: "critical" | "warning" | "info";
  since: number;
  title: string;
  cause: string;
  what_to_do: string;
  nodes: string[];
  ended: number | null;
  count: number;
  sources: { source: string; count: number }[];
}

export interface FailedTry {
  node: string;
  role: string;
  outcome: string;
  status: number | null;
  reason: string;
  duration_ms: number | null;
  error: { class: string; type: string; code: string; length: number; text?: string } | null;
}

/** What a failed request and a decision have in common. */
export interface Ended {
  request_id: string;
  tenant: string;
  model: string;
  route: string;
  node: string;
  attempts: number;
  outcome: string;
  status: number | null;
  duration_ms: number | null;
  failed_tries: FailedTry[];
}

export interface FailedRequest extends Ended {
  time: number;
}

export interface ClientError {
  status: number;
  code: string;
  total: number;
  recent: number;
  sources: { source: string; count: number }[];
  keys: { key_sha256: string; count: number }[];
}

export interface Reload {
  time: number;
  checked: number;
  reason: string;
  error: string | null;
  changed: string[];
  needs_restart: string[];
}

export interface Tenant {
  tenant: string;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
}

export interface Candidate {
  node: string;
  island: string;
  chosen: boolean;
  total_ms: number;
  terms_ms: Record<string, number>;
  cached_tokens: number;
  new_tokens: number;
}

export interface Decision extends Ended {
  time: string;
  priority: string;
  explanation: string;
  prompt_tokens: number | null;
  cached_tokens: number | null;
  candidate_count: number;
  candidates: Candidate[];
  queued_ms: number;
  ttft_ms: number | null;
  reported: { prompt_tokens: number | null; cached_tokens: number | null; output_tokens: number | null };
}

export interface QueueRow {
  priority: string;
  tenant: string;
  waiting: number;
  oldest_s: number;
  rejected: number;
  reasons: Record<string, number>;
}

export interface Prefix {
  id: string;
  tokens: number;
  share: number;
  model: string;
  route: string;
  tenant: string;
  holder_count: number;
  holders: string[];
}

export interface Finding {
  model: string;
  route: string;
  kind: "time" | "id" | "number" | "order" | "text" | "history";
  what_differs: string;
  place: string;
  token: number;
  share: number;
  values: number;
  cached_share: number;
  could_share: number;
  lost_gpu_s: number;
  gpus: number;
  since: number;
  excerpt: { before: string; values: string[]; after: string };
  what_to_do: string;
}

export interface Prompts {
  routes: { model: string; route: string; samples: number; agrees_until: string; common_share: number; unavailable: string }[];
  findings: Finding[];
}

export interface Scaling {
  enabled: boolean;
  leading?: boolean;
  dry_run?: boolean;
  desired_nodes?: number;
  last_decision?: { age_s: number; nodes: number; utilisation: number; panicking: boolean; reasons: string[] } | null;
  nodes?: { node: string | null; state: string; state_age_s: number; offer: string; reason: string }[];
  errors?: Record<string, string>;
  changes: { time: number; nodes: number; desired_nodes: number; reasons: string[] }[];
}

export interface Sections {
  router: { version: string; build: string; policy: string; started: number; models: string[]; journal: boolean; last_reload: Reload | null };
  totals: Sums;
  window: Sums;
  nodes: LiveNode[];
  islands: { name: string; distance_ms: number; queue_ms: number }[];
  routes: (Sums & { model: string; route: string })[];
  queue: { waiting: number; queued_total: number; rows: QueueRow[] };
  tenants: { count: number; rows: Tenant[] };
  client_errors: ClientError[];
  failed_requests: FailedRequest[];
  prefixes: Prefix[];
  scaling: Scaling;
  prompts: Prompts;
  alerts: Alert[];
  ended_alerts: Alert[];
}

export type Row = (number | null)[];

export interface Snapshot extends Sections {
  history: { fields: string[]; fine_s: number; coarse_s: number; fine: Row[]; coarse: Row[] };
  decisions: Decision[];
}

export interface Update extends Partial<Sections> {
  fine: Row[];
  coarse: Row[];
  decisions?: Decision[];
}
