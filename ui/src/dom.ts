// Builds elements without HTML text, so that a name from a node or a client can never become markup.

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined>;

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  fill(element, ...children);
  return element;
}

export function fill(element: Element, ...children: Child[]): void {
  const nodes = children.filter((child) => child !== null && child !== undefined && child !== false);
  element.replaceChildren(...nodes.map((child) => (child instanceof Node ? child : String(child))));
}

export function byId<T extends HTMLElement = HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`no element ${id}`);
  return found as T;
}

/** Set text only where it differs: the selection and screen readers stay where they are. */
export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

export interface Column {
  head: string;
  /** Text is left-aligned, numbers right-aligned. */
  text?: boolean;
  title?: string;
}

export function table(label: string, columns: Column[], rows: Child[][]): HTMLElement {
  const head = el("tr", {}, ...columns.map((column) => headCell(column)));
  const body = rows.map((cells) =>
    el(
      "tr",
      {},
      ...cells.map((cell, index) =>
        el(
          index === 0 ? "th" : "td",
          { class: columns[index]?.text ? "text" : undefined, scope: index === 0 ? "row" : undefined, "data-head": columns[index]?.head },
          cell,
        ),
      ),
    ),
  );
  const made = el("table", { "aria-label": label }, el("thead", {}, head), el("tbody", {}, ...body));
  return el("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": `Table: ${label}` }, made);
}

export function headCell(column: Column): HTMLElement {
  return el("th", { scope: "col", class: column.text ? "text" : undefined, title: column.title }, column.head);
}

/** A bar that shows a share, with its number as text beside it. */
export function meter(share: number, kind = ""): HTMLElement {
  const inner = el("i", { class: kind });
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: "meter", "aria-hidden": "true" }, inner);
}
