// Which page is shown, the token, the theme, and whether what is shown is live.

import { Api } from "./api.js";
import { ClusterPage } from "./cluster.js";
import { Rows, el, say } from "./dom.js";
import { JobPage } from "./job.js";
import { clock } from "./words.js";

const byId = (id) => document.getElementById(id);
const JOBS_REFRESH = 10_000; // ms
const RETRY = 2_000;
const THEMES = ["auto", "light", "dark"];
const ORDERS = {
  drain: { title: "Drain", what: "It ends its step and leaves. No step is lost, and the others go on without it.", done: "is told to drain" },
  evict: { title: "Evict", what: "It is put out at once, in the middle of its step, which the others retry. If what started it starts it again, it may come back.", done: "is evicted" },
};

const api = new Api(askToken);
let page = null;
let heardAt = null;
let shows = 0;
let orders = 0;
const jobRows = new Rows(byId("jobs"), (job) => ({ node: el("option", { value: job }, job), update: () => {} }));
jobRows.none = el("option", { value: "" }, "none yet");

function askToken(why) {
  const dialog = byId("token");
  if (why) say(byId("token-why"), why);
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", async () => resolve(byId("token-value").value.trim() || (await askToken(why))), { once: true });
  }).finally(() => (byId("token-value").value = ""));
}

async function jobs() {
  const found = (await api.get("v1/jobs")).jobs;
  const shown = wanted().job;
  if (shown && !found.some((one) => one.job === shown)) found.push({ job: shown });
  jobRows.show(found, (one) => one.job);
  if (shown) byId("jobs").value = shown;
  return found.filter((one) => one.last_seen != null);
}

function wanted() {
  const [, kind, job] = location.hash.split("/");
  return { kind: kind || "", job: kind === "job" ? decodeURIComponent(job ?? "") : null };
}

function tell(error) {
  byId("problem").hidden = !error;
  if (error) say(byId("problem"), error instanceof TypeError ? "The metrics service does not answer." : error.message);
}

function live(yes, pause) {
  heardAt = yes ? null : (heardAt ?? Date.now() / 1000);
  byId("live").dataset.live = yes ? "yes" : "no";
  say(byId("live"), yes ? "live" : `not live since ${clock(heardAt)}; next try in ${Math.ceil(pause / 1000)} s`);
}

async function order(action, name) {
  const { title, what, done } = ORDERS[action];
  const mine = ++orders;
  const dialog = byId("order");
  const job = wanted().job;
  say(byId("order-title"), `${title} ${name}?`);
  say(byId("order-what"), what);
  say(byId("order-yes"), `${title} ${name}`);
  byId("order-reason").value = "";
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((resolve) => {
    dialog.addEventListener("close", function closed() {
      if (dialog.open && mine === orders) return; // it is told late: of the question before
      dialog.removeEventListener("close", closed);
      resolve();
    });
  });
  if (mine !== orders || dialog.returnValue !== "yes") return;
  try {
    const reason = byId("order-reason").value.trim() || "from the dashboard";
    const answer = await api.post(`v1/jobs/${encodeURIComponent(job)}/replicas/${encodeURIComponent(name)}/${action}`, { reason });
    toast(answer.sentence || `${name} ${done}`);
  } catch (error) {
    toast(`${title} ${name}: ${error instanceof TypeError ? "the metrics service does not answer" : error.message}`);
  }
}

function toast(text) {
  const node = el("p", { class: "toast", role: "status" }, text);
  document.body.append(node);
  setTimeout(() => node.remove(), 8000);
}

async function show() {
  const { kind, job } = wanted();
  const mine = ++shows;
  page?.close();
  page = null;
  live(false, 0);
  let known = [];
  try {
    const [{ role }, found] = await Promise.all([api.get("v1/whoami"), jobs()]);
    document.body.dataset.role = role;
    known = found;
  } catch (error) {
    tell(error);
    setTimeout(() => mine === shows && show(), RETRY);
    return;
  }
  if (mine !== shows) return; // somebody went on
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
byId("token").addEventListener("cancel", (event) => event.preventDefault());
byId("sign").addEventListener("click", async () => {
  api.token = await askToken("");
  show();
});
byId("jobs").addEventListener("change", (event) => (location.hash = `#/job/${encodeURIComponent(event.target.value)}`));
addEventListener("hashchange", show);
setInterval(() => page instanceof JobPage && !document.hidden && jobs().catch(() => {}), JOBS_REFRESH);
applyTheme();
show();
