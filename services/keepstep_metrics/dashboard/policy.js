// The dialog that changes the policy of a job.

import { el } from "./dom.js";

/**
 * Asks for changes of `policy`. Resolves with the changed fields, or with null.
 * `known`: the JSON schema of each field, by name.
 */
export function askPolicy(dialog, policy, known) {
  const inputs = Object.entries(policy).map(([name, value]) => [name, value, input(name, value, known[name]?.enum)]);
  const fields = inputs.map(([name, , node]) => el("label", {}, el("code", {}, name), ` ${text(known[name])}`, node));
  dialog.querySelector(".fields").replaceChildren(...fields);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") return resolve(null);
      const given = inputs.map(([name, value, node]) => [name, value, read(node, value)]);
      const changed = given.filter(([, before, after]) => after !== before);
      resolve(changed.length ? Object.fromEntries(changed.map(([name, , after]) => [name, after])) : null);
    }, { once: true });
  });
}

function text({ description = "", "x-unit": unit } = {}) {
  return unit === "seconds" ? `${description} (in seconds)` : description;
}

function input(name, value, choices) {
  if (!choices) {
    const kind = typeof value === "string" ? "text" : typeof value === "boolean" ? "checkbox" : "number";
    return el("input", { name, type: kind, step: "any", min: 0, value: value ?? "", checked: value === true });
  }
  return el("select", { name }, ...choices.map((one) => el("option", { selected: one === value }, one)));
}

function read(node, before) {
  if (node.type === "checkbox") return node.checked;
  if (node.type !== "number") return node.value;
  return node.value === "" ? (before == null ? null : before) : Number(node.value);
}
