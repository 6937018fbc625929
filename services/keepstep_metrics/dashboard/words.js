// Names of states, and readable quantities.

/** As in the API, in the label `state` of Prometheus, and in docs/metrics.md. */
export const STATES = [
  "training",
  "waiting_quorum",
  "waiting_slow_group",
  "healing",
  "retrying",
  "lost",
  "draining",
  "standby",
];

export const byName = new Intl.Collator(undefined, { numeric: true }).compare;

const MOST_PLACES = 50_000;
const places = new Map();

/** Sorts `items` by their names. Compares names only when new ones come: with 1,000 of them it takes long. */
export function inOrder(items, nameOf = (one) => one.name) {
  if (places.size > MOST_PLACES) places.clear();
  const added = items.map(nameOf).filter((name) => !places.has(name));
  if (added.length) [...places.keys(), ...new Set(added)].sort(byName).forEach((name, i) => places.set(name, i));
  return items.sort((a, b) => places.get(nameOf(a)) - places.get(nameOf(b)));
}

const clockFormat = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});
const dayFormat = new Intl.DateTimeFormat(undefined, {
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});

/** Formats Unix seconds as the time of day, with the day unless it is today. */
export function clock(t) {
  if (t == null) return "–";
  const date = new Date(t * 1000);
  return (date.toDateString() === new Date().toDateString() ? clockFormat : dayFormat).format(date);
}

/** Formats a duration: 12 ms, 3.4 s, 5 min 2 s, 3 h 4 min. */
export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds > 0 && seconds < 0.00095) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Formats an age as one integer, which does not flicker. */
export function age(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([one]) => seconds >= one) ?? [1, "s"];
  return `${Math.max(0, Math.floor(seconds / size))} ${unit}`;
}

export function bytes(count) {
  if (count == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; count >= 1024 && unit < units.length - 1; unit += 1) count /= 1024;
  return `${unit && count < 99.95 ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export const number = (
  value,
) => (value == null ? "–" : String(Number.isInteger(value) ? value : Number(value.toPrecision(4))));

/** Formats a share as percent; 100 % only for exactly 1. */
export function percent(share) {
  if (share == null) return "–";
  const value = share * 100;
  return `${value < 100 && value > 99.9 ? "> 99.9" : value.toFixed(value === 0 || value === 100 ? 0 : 1)} %`;
}

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

/** Removes the incarnations from the replica_ids in a sentence. */
export const byStableNames = (sentence) => sentence.replace(/:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/g, "");
