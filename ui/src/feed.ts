// Reads GET /admin/live with fetch, because EventSource cannot send the token as a header.
import type { Snapshot, Update } from "./types";

const TOKEN_KEY = "warmroute-admin-token";
const MAX_DELAY_MS = 10_000;
const SILENT_MS = 10_000;
const HIDDEN_MS = 60_000;

export type State = "connecting" | "live" | "reconnecting" | "paused";

export interface Handlers {
  snapshot(data: Snapshot): void;
  update(data: Update): void;
  state(state: State, reason: string): void;
  needsToken(wrong: boolean): void;
}

export function token(): string {
  return sessionStorage.getItem(TOKEN_KEY) ?? "";
}

export function setToken(value: string): void {
  if (value) sessionStorage.setItem(TOKEN_KEY, value);
  else sessionStorage.removeItem(TOKEN_KEY);
}

export function authorization(): Record<string, string> {
  const value = token();
  return value ? { Authorization: `Bearer ${value}` } : {};
}

export async function errorMessage(response: Response): Promise<string> {
  try {
    return (await response.json()).error.message as string;
  } catch {
    return `the router answered ${response.status}`;
  }
}

export class Feed {
  private abort: AbortController | null = null;
  private hiddenTimer: number | undefined;
  private generation = 0;

  constructor(private readonly handlers: Handlers) {
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
  }

  /** Connect, and connect again whenever the connection is lost. */
  async run(): Promise<void> {
    const generation = ++this.generation;
    this.abort?.abort();
    let delay_ms = 500;
    let first = true;
    while (generation === this.generation) {
      if (first) this.handlers.state("connecting", "");
      let reason = "connection lost";
      try {
        const outcome = await this.read(() => {
          delay_ms = 500;
        });
        if (outcome === "needs-token") return;
        if (outcome) reason = outcome;
      } catch (error) {
        if (error instanceof Error && error.name !== "AbortError" && error.name !== "TypeError") console.error(error);
      }
      if (generation !== this.generation) return;
      first = false;
      this.handlers.state("reconnecting", reason);
      await new Promise((resolve) => setTimeout(resolve, delay_ms));
      delay_ms = Math.min(MAX_DELAY_MS, delay_ms * 2);
    }
  }

  stop(): void {
    this.generation++;
    this.abort?.abort();
  }

  /** A page in the background for a minute stops reading, so that it costs the router nothing. */
  private visibilityChanged(): void {
    window.clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = window.setTimeout(() => {
        this.stop();
        this.handlers.state("paused", "in the background");
      }, HIDDEN_MS);
    } else if (this.abort?.signal.aborted) {
      void this.run();
    }
  }

  private async read(connected: () => void): Promise<string> {
    const abort = (this.abort = new AbortController());
    let silence = window.setTimeout(() => abort.abort(), SILENT_MS);
    try {
      const response = await fetch("/admin/live", {
        headers: { Accept: "text/event-stream", ...authorization() },
        cache: "no-store",
        signal: abort.signal,
      });
      if (response.status === 401) {
        const wrong = token() !== "";
        setToken("");
        this.handlers.needsToken(wrong);
        return "needs-token";
      }
      if (!response.ok || !response.body) return await errorMessage(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let pending = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return "";
        window.clearTimeout(silence);
        silence = window.setTimeout(() => abort.abort(), SILENT_MS);
        pending += value;
        for (let end = pending.indexOf("\n\n"); end >= 0; end = pending.indexOf("\n\n")) {
          const event = pending.slice(0, end);
          pending = pending.slice(end + 2);
          this.dispatch(event);
          connected();
        }
      }
    } finally {
      window.clearTimeout(silence);
    }
  }

  private dispatch(text: string): void {
    const lines = text.split("\n");
    const name = lines.find((line) => line.startsWith("event: "))?.slice(7);
    const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
    if (!data) return;
    if (name === "snapshot") {
      this.handlers.state("live", "");
      this.handlers.snapshot(JSON.parse(data) as Snapshot);
    } else if (name === "update") {
      this.handlers.update(JSON.parse(data) as Update);
    }
  }
}
