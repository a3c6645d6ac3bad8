// Draws the route of an answer: you, the servers with their milliseconds, and back; who is lost, and who took over.

import { h } from "./dom.js";
import { bytes, milliseconds, numbered, reasonFor, span } from "./text.js";
import { checkedText, stepMilliseconds } from "./route.js";

/** Draws the route of the message `node` into `place`. `current` tells servers' names, `receipts` saves and checks them. */
export function paintRoute(place, node, current, receipts) {
  const { route } = node;
  if (!route) return;
  const name = (peer) => route.names?.[peer] ?? current(peer);
  const drawing = JSON.stringify([route, node.state]);
  if (place.drawing === drawing) return;
  place.drawing = drawing;
  const opened = place.querySelector("details")?.open ?? false;
  place.replaceChildren(chain(route, node, name), ...below(route, node, name, receipts, opened));
}

function chain(route, node, name) {
  const live = node.state === "answering";
  if (!route.hops.length && !route.waiting) {
    return h("p", { class: "chain-none" }, live ? "Looking for servers and reading your question …" : "");
  }
  const most = Math.max(...route.hops.map((hop) => hop.ms), 0.001);
  const hops = route.hops.map((hop) => {
    const waiting = route.waiting && route.waiting.peer === hop.peer;
    const share = h("span", { class: "share", "aria-hidden": "true" });
    share.style.setProperty("--share", `${Math.round((100 * hop.ms) / most)}%`);
    const fresh = route.changes.some((change) => change.came.some((one) => one.peer === hop.peer));
    return h(
      "li",
      { class: `hop${waiting ? " lost" : ""}${fresh ? " fresh" : ""}`, title: hop.peer },
      h("span", { class: "hop-name" }, name(hop.peer)),
      h("span", { class: "hop-blocks" }, `blocks ${span(hop.blocks)}${hop.relayed ? ", by a relay" : ""}`),
      h("span", { class: "hop-ms" }, waiting ? (route.waiting.lost ? "lost" : "silent") : hop.ms ? milliseconds(hop.ms) : "…"),
      share,
    );
  });
  return h(
    "ol",
    { class: `chain${live ? " live" : ""}${route.waiting ? " held" : ""}`, "aria-label": "The route of this answer" },
    h("li", { class: "end" }, "you"),
    hops,
    h("li", { class: "end" }, "answer"),
  );
}

function below(route, node, name, receipts, opened) {
  const parts = [];
  if (route.waiting) {
    const { peer, blocks, lost, reason, seconds } = route.waiting;
    const what = lost ? "is gone" : "does not answer";
    const why = reason ? ` (${reasonFor(reason, name)})` : "";
    const wait = seconds ? ` Others for its blocks are looked for, up to ${Math.round(seconds)} s.` : " Others for its blocks are looked for.";
    parts.push(h("p", { class: "held-by" }, `Server ${name(peer)}, blocks ${span(blocks)}, ${what}${why}.${wait}`));
  }
  for (const change of route.changes) parts.push(h("p", { class: "change" }, changeText(change, name)));
  if (!route.hops.length) return parts;
  const rows = route.hops.map((hop) =>
    h(
      "tr",
      {},
      h("th", { scope: "row", title: hop.peer }, name(hop.peer)),
      h("td", {}, span(hop.blocks)),
      h("td", { class: "right" }, milliseconds(hop.ms)),
      h("td", { class: "right" }, bytes(hop.sent)),
      h("td", { class: "right" }, bytes(hop.received)),
    ),
  );
  const table = h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ["Server", "Blocks", "Last step", "Sent", "Received"].map((text, at) => h("th", { scope: "col", class: at > 1 ? "right" : null }, text)))),
    h("tbody", {}, rows),
  );
  const scroll = h("div", { class: "wide", role: "group", tabindex: "0", "aria-label": "Servers of this answer" }, table);
  const details = h("details", { open: opened }, h("summary", {}, summary(route, node)), scroll);
  if (route.receipts) details.append(proof(route.receipts, receipts));
  return [...parts, details];
}

function summary(route, node) {
  const parts = [numbered(route.hops.length, "server"), `${milliseconds(stepMilliseconds(route))} a step`];
  if (route.tokens && node.seconds) parts.push(`${(route.tokens / node.seconds).toFixed(1)} tokens/s`);
  if (route.recoveries) parts.push(`${route.recoveries} recover${route.recoveries === 1 ? "y" : "ies"}`);
  return parts.join(" · ");
}

function changeText({ at, lost, came }, name) {
  const when = at ? `after ${numbered(at, "token")}` : "before the first word";
  const names = (hops) => hops.map((hop) => `${name(hop.peer)} (${span(hop.blocks)})`).join(", ");
  if (lost.length && came.length) return `Recovered ${when}: ${names(came)} took over from ${names(lost)}.`;
  return `Recovered ${when}${lost.length ? `: ${names(lost)} is back` : ""}.`;
}

function proof({ count, digest, checked }, { save, check }) {
  const button = (text, onclick) => h("button", { type: "button", class: "plain small", onclick }, text);
  const text = `${numbered(count, "signed receipt")}, digest ${digest.slice(0, 12)}…`;
  const found = checked ? h("strong", {}, checkedText(checked)) : button("Compute again", check);
  return h("p", { class: "receipts" }, h("span", { title: digest }, text), " ", button("Save receipts", save), " ", found);
}
