const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–";

export function count(value: number): string {
  return value >= 1e6 ? compact.format(value) : whole.format(value);
}

export function rate(value: number): string {
  return value >= 100 || value === 0 ? whole.format(value) : one.format(value);
}

export function decimal(value: number): string {
  if (value === 0) return "0";
  return value >= 100 ? whole.format(value) : value >= 1 ? value.toFixed(1) : value.toPrecision(2);
}

export function percent(share: number | null): string {
  return share === null ? NONE : `${share >= 0.995 || share === 0 || share >= 0.1 ? Math.round(share * 100) : one.format(share * 100)} %`;
}

export function ms(value: number | null): string {
  if (value === null) return NONE;
  if (value >= 10_000) return `${one.format(value / 1000)} s`;
  return value >= 10 || value === 0 ? `${whole.format(value)} ms` : `${one.format(value)} ms`;
}

export function seconds(value: number): string {
  if (value >= 172_800) return `${one.format(value / 86_400)} days`;
  if (value >= 7200) return `${one.format(value / 3600)} h`;
  if (value >= 180) return `${whole.format(value / 60)} min`;
  return `${value >= 10 ? whole.format(value) : one.format(value)} s`;
}

export function ago(unix_s: number): string {
  return `${seconds(Math.max(0, Date.now() / 1000 - unix_s))} ago`;
}

export function clock(unix_s: number): string {
  const date = new Date(unix_s * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()].map((part) => String(part).padStart(2, "0")).join(":");
}

export function plural(value: number, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
