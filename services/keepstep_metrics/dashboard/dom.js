// Builds and updates the page. Data of the API only become text nodes: nothing here parses HTML.

/** Creates an element. `on...` attributes are listeners; true is an empty attribute; false and null are omitted. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

/** Sets the text of a node if it differs. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Creates a panel with a heading. */
export function panel(title, ...children) {
  return el("section", { class: "panel" }, el("h2", {}, title), ...children);
}

/** Creates a table in a scrolling box. Columns are [heading, class]. */
export function table(label, columns) {
  const body = el("tbody");
  const heads = columns.map(([text, kind]) => el("th", { scope: "col", class: kind }, text));
  const whole = el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body);
  return { body, box: el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, whole) };
}

/** Rows by key; an update changes only the rows that differ. `make(key)` returns {node, update(item)}. */
export class Rows {
  constructor(parent, make, none = "none") {
    this.parent = parent;
    this.make = make;
    this.none = parent.tagName === "TBODY"
      ? el("tr", {}, el("td", { class: "none", colspan: 20 }, none))
      : el("li", { class: "none" }, none);
    this.known = new Map();
  }

  show(items, keyOf) {
    const byKey = new Map(items.map((item) => [keyOf(item), item]));
    for (const [key, row] of this.known) {
      if (byKey.has(key)) continue;
      row.node.remove(); // first, so that the rows after it stay in place and keep the focus
      this.known.delete(key);
    }
    let at = this.parent.firstChild;
    for (const [key, item] of byKey) {
      if (!this.known.has(key)) this.known.set(key, this.make(key));
      const row = this.known.get(key);
      row.update(item);
      if (row.node === at) at = at.nextSibling;
      else this.parent.insertBefore(row.node, at);
    }
    if (byKey.size) this.none.remove();
    else this.parent.append(this.none);
  }
}

/** Creates a row of text cells for `Rows`; `texts(item)` returns their texts. */
export function textRow(columns, texts) {
  const cells = columns.map(([, kind]) => el("td", { class: kind }));
  return { node: el("tr", {}, ...cells), update: (item) => texts(item).forEach((text, i) => say(cells[i], text)) };
}
