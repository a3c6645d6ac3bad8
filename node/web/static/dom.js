// Makes elements. Text becomes text nodes and nothing else: no function here takes HTML.

import { highlighted } from "./highlight.js";

const SVG = "http://www.w3.org/2000/svg";
const FROM_MARKDOWN = new Set(
  "p h3 h4 h5 h6 hr blockquote ul ol li table thead tbody tr th td pre code strong em del a br span sub sup".split(" "),
);

/** An element. Attributes that are functions are listeners; those that are null, undefined or false are left out. */
export function h(tag, attrs = {}, ...children) {
  return filled(document.createElement(tag), attrs, children);
}

/** An element of a drawing. */
export function svg(tag, attrs = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attrs, children);
}

function filled(node, attrs, children) {
  for (const [name, value] of Object.entries(attrs)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name.replace(/^on/, ""), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** A button with a picture and a name that is shown as a tooltip and read aloud. */
export function iconButton(icon, name, onclick, attrs = {}) {
  return h("button", { type: "button", class: "icon", title: name, "aria-label": name, onclick, ...attrs }, drawn(icon));
}

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  gear: "M4 7h9M17 7h3M4 17h3M11 17h9M13 5v4M17 5v4M7 15v4M11 15v4",
  close: "M6 6l12 12M18 6L6 18",
  swarm: "M12 4v4M12 16v4M4 12h4M16 12h4M12 12h.01M9 12a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
  chat: "M5 6h14v10H10l-5 4z",
  picture: "M4 5h16v14H4zM4 16l5-5 5 5M13 15l3-3 4 4M15 9h.01",
};

/** A picture for a button, hidden from screen readers. */
export function drawn(icon) {
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "drawn" }, svg("path", { d: ICONS[icon] }));
}

/** What markdown.js has parsed, as elements. */
export function rendered(nodes) {
  return nodes.map((node) => (typeof node === "string" ? document.createTextNode(node) : one(node)));
}

function one({ tag, attrs, children }) {
  if (!FROM_MARKDOWN.has(tag)) return document.createTextNode("");
  if (tag === "pre") return codeBlock(attrs.language, children);
  const node = document.createElement(tag);
  if (tag === "a") {
    // markdown.js has checked the address.
    node.href = attrs.href;
    node.title = attrs.href;
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
  }
  if (tag === "ol" && attrs.start) node.setAttribute("start", attrs.start);
  if (attrs.align) node.classList.add(attrs.align);
  if (attrs.formula) node.classList.add("formula", attrs.formula);
  if (attrs.task) {
    const done = attrs.task === "done";
    node.classList.add("task");
    node.append(h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" }));
  }
  node.append(...rendered(children));
  if (tag !== "table") return node;
  return h("div", { class: "wide", role: "group", tabindex: "0", "aria-label": "Table" }, node);
}

function codeBlock(language, children) {
  const pieces = highlighted(children[0].children[0], language).map(([kind, text]) => (kind ? h("span", { class: `t-${kind}` }, text) : text));
  const code = h("pre", { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" }, h("code", {}, pieces));
  const copy = iconButton("copy", "Copy this code", () => copied(code.textContent, copy));
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language || "code"), copy), code);
}

/** Copies a text and says so at the button. */
export async function copied(text, button) {
  const before = button.getAttribute("aria-label");
  try {
    await navigator.clipboard.writeText(text);
    button.setAttribute("aria-label", "Copied");
    button.classList.add("done");
  } catch {
    button.setAttribute("aria-label", "The browser does not allow copying");
  }
  setTimeout(() => {
    button.setAttribute("aria-label", before);
    button.classList.remove("done");
  }, 1500);
}

/** Brings `parent` from the blocks `before` to the blocks `after`, and leaves alone what has not changed. */
export function patched(parent, before, after) {
  let same = 0;
  while (same < before.length && same < after.length && before[same] === after[same].key) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const block of after.slice(same)) parent.append(...rendered([block.node]));
  return after.map((block) => block.key);
}

/** Blocks with what tells them apart, as `patched` takes them. */
export function keyed(nodes) {
  return nodes.map((node) => ({ node, key: JSON.stringify(node) }));
}
