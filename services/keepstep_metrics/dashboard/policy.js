// The dialog that changes the policy of a job.

import { el, say } from "./dom.js";

/**
 * Asks for changes of `policy`. Resolves with the changed fields, or with null.
 * `known`: the JSON schema of each field, by name. `given`: changes of the last try, and `wrong`: why it failed.
 */
export function askPolicy(dialog, policy, known, given = {}, wrong = "") {
  const inputs = Object.entries(policy).map(([name, before]) => {
    const value = name in given ? given[name] : before;
    return [name, before, input(name, value, known[name] ?? {})];
  });
  const fields = inputs.map(([name, , node]) => el("label", {}, el("code", {}, name), ` ${text(known[name])}`, node));
  dialog.querySelector(".fields").replaceChildren(...fields);
  say(dialog.querySelector("[role=alert]"), wrong);
  dialog.returnValue = "no";
  dialog.showModal();
  inputs[0]?.[2].focus(); // not the scrolling box around it
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") return resolve(null);
      const now = inputs.map(([name, before, node]) => [name, before, read(node)]);
      const changed = now.filter(([, before, after]) => after !== before);
      resolve(Object.fromEntries(changed.map(([name, , after]) => [name, after])));
    }, { once: true });
  });
}

function text({ description = "", "x-unit": unit } = {}) {
  return unit === "seconds" ? `${description} (in seconds)` : description;
}

function input(name, value, { enum: choices, type, minimum, maximum, anyOf }) {
  if (choices) return el("select", { name }, ...choices.map((one) => el("option", { selected: one === value }, one)));
  if (typeof value === "boolean") return el("input", { name, type: "checkbox", checked: value });
  if (typeof value === "string") return el("input", { name, type: "text", value });
  const required = !anyOf?.some((one) => one.type === "null"); // else an empty field is null
  const [min, max, step] = [minimum, maximum, type === "integer" ? 1 : "any"];
  return el("input", { name, type: "number", required, min, max, step, value });
}

function read(node) {
  if (node.type === "checkbox") return node.checked;
  if (node.type !== "number") return node.value;
  return node.value === "" ? null : Number(node.value);
}
