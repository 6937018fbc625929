// Decisions about what a chart shows. Pure: tests call these functions in a browser.

const FAR = 3; // times the usual values: a higher value is an outlier
const USUAL = 0.95; // quantile of the values that must fit; a job has few points when it is young
const ENOUGH = 20; // values for a quantile that means something
const NEAR_ZERO = 0.92; // below this ratio of lowest to highest, the axis starts at zero
const LEAST_SPAN = 0.05; // of the highest value: a constant is drawn as a line

/** Returns the limits of the axis, and how many outliers are above it: {low, high, clipped, highest}. */
export function limits(columns, fromZero) {
  const values = columns.flat().filter((value) => value != null).sort((a, b) => a - b);
  if (!values.length) return { low: 0, high: 1, clipped: 0, highest: null };
  const [lowest, highest] = [values[0], values.at(-1)];
  const usual = values[Math.floor(USUAL * (values.length - 1))];
  const cut = values.length >= ENOUGH && usual > 0 && highest > FAR * usual;
  const top = cut ? usual * 1.5 : highest;
  const clipped = cut ? values.filter((value) => value > top).length : 0;
  if (fromZero || lowest <= 0 || lowest / top < NEAR_ZERO) {
    const low = Math.min(0, lowest);
    return { low, high: top + ((top - low) || 1) * 0.1, clipped, highest };
  }
  const margin = Math.max(LEAST_SPAN * top, (top - lowest) * 1.2) / 2;
  const middle = (top + lowest) / 2;
  return { low: middle - margin, high: middle + margin, clipped, highest };
}

/** Returns the last value that is not missing. */
export const newest = (values) => values.findLast((value) => value != null) ?? null;

/**
 * Returns columns over the step instead of the time. A job that went back repeats steps: the later values count.
 * `steps`: the step at each point; `columns`: values at each point; `marks`: [{t}] with `times` of the points.
 */
export function byStep(times, steps, columns, marks) {
  const at = new Map();
  steps.forEach((step, i) => {
    if (step != null && columns.some((one) => one[i] != null)) at.set(step, i);
  });
  const order = [...at.keys()].sort((a, b) => a - b);
  const stepAt = (t) => steps[times.findLastIndex((time, i) => time <= t && steps[i] != null)];
  return {
    x: order,
    columns: columns.map((one) => order.map((step) => one[at.get(step)])),
    marks: marks.map((one) => ({ ...one, t: stepAt(one.t) })).filter((one) => one.t != null),
  };
}

/** Returns the state of a job in one sentence. `now`: the answer of `now`. */
export function headline(now, plural) {
  if (!now.groups.length) return "No group is running.";
  // The waiting group is not the slow one.
  const normal = (state) => state === "training" || state === "standby" || (now.blame && state === "waiting_quorum");
  const stuck = Object.entries(Object.groupBy(now.groups, (one) => one.state)).filter(([state]) => !normal(state));
  const others = stuck.map(([state, groups]) =>
    groups.length === 1 ? `${groups[0].name} is ${state}` : `${plural(groups.length, "group")} are ${state}`
  );
  if (now.blame) return [...others, `${now.blame.sentence}.`].join("; ");
  const spares = now.groups.filter((one) => one.state === "standby").length;
  const groups = plural(now.groups.length - spares, "group") + (spares ? ` and ${plural(spares, "spare")}` : "");
  const of = `${now.participants.length} of ${groups} in the quorum`;
  return others.length ? `${of}; ${others.join(", ")}.` : `${of}, all training.`;
}
