// Page navigation, the token, the theme, and the connection status.

import { Api, ApiError } from "./api.js";
import { ClusterPage } from "./cluster.js";
import { el, Rows, say } from "./dom.js";
import { JobPage } from "./job.js";
import { askPolicy } from "./policy.js";
import { byStableNames, clock } from "./words.js";

const byId = (id) => document.getElementById(id);
const JOBS_REFRESH = 10_000; // ms
const RETRY = 2_000;
const THEMES = ["auto", "light", "dark"];
const ORDERS = {
  drain: {
    title: "Drain",
    what: "The group finishes its step and leaves. No step is lost; the other groups continue.",
    done: "is draining",
  },
  replace: {
    title: "Replace",
    what: "A spare takes the place of the group, which then finishes its step and leaves. No step is lost.",
    done: "leaves when a spare has its place",
  },
  readmit: {
    title: "Readmit",
    what: "Bans and evictions of this name are lifted: the group may join again.",
    done: "may join again",
  },
  verify: {
    title: "Verify",
    what: "All groups compare their weights at the next step. An event tells the result.",
    done: "is ordered",
  },
  evict: {
    title: "Evict",
    what:
      "The group is removed at once, in the middle of its step; the other groups retry the step. If its launcher restarts it, it can join again.",
    done: "was evicted",
  },
};

const REASONED = ["drain", "replace", "evict"];

const api = new Api(askToken, show);
let page = null;
let heardAt = null;
let asked = null;
let shows = 0;
let unanswered = new AbortController();
const jobRows = new Rows(byId("jobs"), (job) => ({ node: el("option", { value: job }, job), update: () => {} }));
jobRows.none = el("option", { value: "" }, "none yet");

/** Resolves with a token, or with null if it is `optional` and the user gave none. Concurrent calls share one dialog. */
function askToken(wrong, optional = false) {
  const [dialog, value, cancel] = ["token", "token-value", "token-cancel"].map(byId);
  const open = () => {
    dialog.returnValue = "";
    if (!dialog.open) dialog.showModal();
  };
  say(byId("token-wrong"), wrong);
  cancel.hidden = !optional;
  open();
  asked ??= new Promise((resolve) => {
    dialog.addEventListener("close", function closed() {
      if (dialog.open) return; // a late event of the previous dialog
      const given = dialog.returnValue === "yes" ? value.value.trim() : null;
      if (!given && cancel.hidden) {
        open();
        return;
      }
      dialog.removeEventListener("close", closed);
      value.value = "";
      asked = null;
      resolve(given);
    });
  });
  return asked;
}

async function jobs() {
  const found = (await api.get("v1/jobs")).jobs;
  const shown = wanted().job;
  if (shown && !found.some((one) => one.job === shown)) found.push({ job: shown });
  jobRows.show(found, (one) => one.job);
  byId("jobs").value = shown ?? ""; // nothing selected on the cluster page, so that every job can be chosen
  return found.filter((one) => one.last_seen != null);
}

function wanted() {
  const [, kind, job] = location.hash.split("/");
  return { kind: kind || "", job: kind === "job" ? decoded(job ?? "") : null };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a stray % in a typed address
  }
}

function tell(error) {
  byId("problem").hidden = !error;
  if (!error) return;
  if (!(error instanceof ApiError)) console.error(error);
  say(
    byId("problem"),
    error instanceof ApiError ? error.message : `Cannot show the answer of the metrics service: ${error.message}`,
  );
}

function live(yes, pause, why) {
  heardAt = yes ? null : (heardAt ?? Date.now() / 1000);
  byId("live").dataset.live = yes ? "yes" : "no";
  const since = () =>
    `not live since ${clock(heardAt)}${why ? `: ${why}` : ""}; next try in ${Math.ceil(pause / 1000)} s`;
  say(byId("live"), yes ? "live" : pause ? since() : "connecting");
}

/** Resolves with the operator's answer. Not with the event "close": the next order may be open when it arrives. */
function confirmed(dialog) {
  unanswered.abort();
  const { signal } = unanswered = new AbortController();
  return new Promise((resolve) => {
    signal.addEventListener("abort", () => resolve(false));
    dialog.addEventListener("cancel", () => resolve(false), { signal });
    dialog.addEventListener("submit", (event) => resolve(event.submitter?.value === "yes"), { signal });
  });
}

async function order(job, action, name) {
  const path = `v1/jobs/${encodeURIComponent(job)}`;
  if (action === "policy") return changePolicy(path, job);
  const { title, what, done } = ORDERS[action];
  const dialog = byId("order");
  say(byId("order-title"), `${title} ${name || job}?`);
  say(byId("order-what"), what);
  say(byId("order-yes"), `${title} ${name || job}`);
  byId("order-reason").parentElement.hidden = !REASONED.includes(action);
  byId("order-reason").value = "";
  dialog.showModal();
  if (!await confirmed(dialog)) return;
  const reason = byId("order-reason").value.trim() || "from the dashboard";
  try {
    const place = name ? `${path}/replicas/${encodeURIComponent(name)}` : path;
    const answer = await api.post(`${place}/${action}`, REASONED.includes(action) ? { reason } : {});
    toast(byStableNames(answer.sentence || `${name || title} ${done}`));
  } catch (error) {
    toast(`${title} ${name || job}: ${error.message}`);
  }
}

async function changePolicy(path, job) {
  say(byId("policy-title"), `Policy of ${job}`);
  try {
    const [{ policy }, { components }] = await Promise.all([api.get(path), api.get("openapi.json")]);
    const known = components.schemas.Policy.properties;
    let [changes, wrong] = [{}, ""];
    do {
      changes = await askPolicy(byId("policy"), policy, known, changes, wrong);
      if (!changes) return;
      wrong = Object.keys(changes).length ? await refusal(api.post(path, changes, "PATCH")) : "";
    } while (wrong);
    const told = Object.entries(changes).map(([name, value]) => `${name} is ${value ?? "unset"}`);
    toast(`Policy: ${told.join(", ") || "nothing was changed"}`);
  } catch (error) {
    toast(`Policy: ${error.message}`);
  }
}

/** Resolves with the reason why the service refused the values of a request; empty: it took them. */
async function refusal(request) {
  try {
    await request;
    return "";
  } catch (error) {
    if (error.status !== 400) throw error;
    return error.message;
  }
}

function toast(text) {
  document.querySelector(".toast")?.remove();
  const node = el("p", { class: "toast", role: "status" }, text);
  document.body.append(node);
  setTimeout(() => node.remove(), 8000);
}

async function show() {
  const { kind, job } = wanted();
  const { hash } = location;
  const mine = ++shows;
  page?.close();
  page = null;
  live(false, 0);
  let known = [];
  try {
    const [{ role, token }, found] = await Promise.all([api.get("v1/whoami"), jobs()]);
    document.body.dataset.role = role;
    byId("sign").hidden = !token; // without tokens the service answers everyone
    known = found;
  } catch (error) {
    tell(error);
    setTimeout(() => mine === shows && show(), RETRY);
    return;
  }
  if (mine !== shows || location.hash !== hash) return; // another page was opened in the meantime, or is about to be
  if (kind !== "cluster" && !job && known.length) {
    location.replace(`#/job/${encodeURIComponent(known.reduce((a, b) => (b.last_seen > a.last_seen ? b : a)).job)}`);
    return;
  }
  const about = known.find((one) => one.job === job);
  page = job ? new JobPage({ api, job, about, order, live, tell }) : new ClusterPage({ api, live, tell, jobs });
  document.title = job ? `${job} · keepstep` : "keepstep";
  if (job) byId("cluster").removeAttribute("aria-current");
  else byId("cluster").setAttribute("aria-current", "page");
  byId("page").replaceChildren(page.node);
  page.repaint();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => localStorage.getItem("keepstep-theme") ?? "auto";

function applyTheme() {
  document.documentElement.dataset.theme = theme() === "auto" ? (dark.matches ? "dark" : "light") : theme();
  say(byId("theme"), `Theme: ${theme()}`);
  page?.repaint();
}

byId("theme").addEventListener("click", () => {
  localStorage.setItem("keepstep-theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  applyTheme();
});
dark.addEventListener("change", applyTheme);
byId("token").addEventListener("cancel", (event) => byId("token-cancel").hidden && event.preventDefault());
byId("token-cancel").addEventListener("click", () => byId("token").close());
byId("sign").addEventListener("click", async () => (api.token = await askToken("", true)));
byId("order-reason").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !event.target.value.trim()) return; // Enter without a reason cancels: the key may still be down
  event.preventDefault();
  byId("order-yes").click();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address is that of another page
  byId("page").focus();
});
byId("jobs").addEventListener("change", (event) => (location.hash = `#/job/${encodeURIComponent(event.target.value)}`));
addEventListener("hashchange", show);
setInterval(
  () =>
    page instanceof JobPage && !document.hidden &&
    jobs().catch((error) => error instanceof ApiError || console.error(error)),
  JOBS_REFRESH,
);
if (!globalThis.uPlot) throw new Error("static/vendor/uPlot.iife.min.js did not load");
byId("unloaded").remove();
applyTheme();
show();
