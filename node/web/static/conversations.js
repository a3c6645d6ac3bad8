// A conversation is a tree of messages: an edited question and an answer made anew are branches. No DOM, no storage.
//
// {id, title, created, updated, system, nodes: {ID: node}, top: {chosen}}; a node is {id, parent, role, content, chosen,
// route, state, created, pictures}, its `parent` null for a first message, `chosen` the child that is shown, and `pictures`
// data URLs.

import { kept, withPictures } from "./pictures.js";

const TITLE = 160; // characters; what has no room on a screen is left out there

/** A new identifier. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(36).padStart(2, "0")).join("");
}

export function newConversation(now, system = "") {
  return { id: newId(), title: "", created: now, updated: now, system, nodes: {}, top: { chosen: null } };
}

/** Adds a message behind `parent` (an id, or null) and shows it; returns it. */
export function add(conversation, parent, role, content, now, pictures = []) {
  const node = { id: newId(), parent, role, content, chosen: null, route: null, state: "done", created: now };
  if (pictures.length) node.pictures = pictures;
  conversation.nodes[node.id] = node;
  holder(conversation, parent).chosen = node.id;
  conversation.updated = now;
  if (!conversation.title && role === "user") conversation.title = titleOf(content || "A picture");
  return node;
}

function holder(conversation, parent) {
  return parent === null ? conversation.top : conversation.nodes[parent];
}

/** The messages that are shown, in their order. */
export function path(conversation) {
  const found = [];
  let id = conversation.top.chosen;
  while (id && conversation.nodes[id] && found.length < 10000) {
    found.push(conversation.nodes[id]);
    id = conversation.nodes[id].chosen;
  }
  return found;
}

/** The messages that stand in the place of one, oldest first, and which of them it is. */
export function branches(conversation, id) {
  const { parent } = conversation.nodes[id];
  const ids = Object.values(conversation.nodes)
    .filter((node) => node.parent === parent)
    .sort((one, other) => one.created - other.created || (one.id < other.id ? -1 : 1))
    .map((node) => node.id);
  return { ids, index: ids.indexOf(id) };
}

/** Shows the branch `step` places away from that of the message. */
export function turn(conversation, id, step) {
  const { ids, index } = branches(conversation, id);
  const next = ids[Math.max(0, Math.min(ids.length - 1, index + step))];
  holder(conversation, conversation.nodes[id].parent).chosen = next;
  return next;
}

/** What is sent for an answer behind the message `id`: the messages that lead to it, and the system prompt. */
export function messagesTo(conversation, id) {
  const found = [];
  for (let at = id; at !== null; at = conversation.nodes[at].parent) {
    const { role, content, pictures } = conversation.nodes[at];
    if (content || role === "user") found.push({ role, content: withPictures(content, pictures) });
  }
  if (conversation.system.trim()) found.push({ role: "system", content: conversation.system });
  return found.reverse();
}

/** A short name of a conversation that begins with this question. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  const chars = [...line];
  return chars.length > TITLE ? `${chars.slice(0, TITLE - 1).join("").trimEnd()}…` : line;
}

/** Whether a conversation has a text, in any of its branches or its title. */
export function mentions(conversation, text) {
  const wanted = text.trim().toLowerCase();
  const has = (said) => said.toLowerCase().includes(wanted);
  return has(conversation.title) || Object.values(conversation.nodes).some(({ content }) => has(content));
}

/** What came from storage or a file if it is a conversation; else null. Answers that were being made have stopped. */
export function restored(data) {
  if (typeof data?.id !== "string" || !data.nodes || typeof data.nodes !== "object" || !data.top) return null;
  const whole = { ...data, ...Object.fromEntries(["title", "system"].map((name) => [name, String(data[name] ?? "")])) };
  for (const name of ["created", "updated"]) whole[name] = Number(data[name]) || 0;
  for (const [id, node] of Object.entries(data.nodes)) {
    if (node?.id !== id || typeof node.content !== "string" || !["user", "assistant"].includes(node.role)) return null;
    if (!isChild(data.nodes, node.chosen, id)) return null;
    if (node.state === "answering") node.state = "stopped";
    if (node.route && !isRoute(node.route)) node.route = null;
    if (node.route) node.route.waiting = null;
    if (node.route?.receipts) delete node.route.receipts.checked; // whoever made the file can have written it
    if ("pictures" in node) node.pictures = kept(node.pictures);
  }
  return isTree(data.nodes) && isChild(data.nodes, data.top.chosen, null) ? whole : null;
}

const isChild = (nodes, chosen, parent) => (chosen ?? null) === null || nodes[chosen]?.parent === parent;
const areHops = (hops) => Array.isArray(hops) && hops.every((hop) => typeof hop?.peer === "string" && Array.isArray(hop.blocks));
const isRoute = ({ hops, changes, receipts }) =>
  areHops(hops) && Array.isArray(changes) && changes.every((change) => areHops(change?.lost) && areHops(change.came)) && (!receipts || typeof receipts.digest === "string");

/** Whether every message leads to a first one. */
function isTree(nodes) {
  const rooted = new Set([null]);
  for (const first of Object.keys(nodes)) {
    const way = new Set();
    let at = first;
    for (; !rooted.has(at); at = nodes[at].parent) {
      if (way.has(at) || !Object.hasOwn(nodes, at)) return false;
      way.add(at);
    }
    for (const id of way) rooted.add(id);
  }
  return true;
}

/** Conversations as a file. */
export function exported(conversations) {
  return JSON.stringify({ petalnode_chats: 1, conversations }, null, 1);
}

/** The conversations of a file that `exported` made; null if it is none. */
export function imported(text) {
  try {
    const { petalnode_chats: version, conversations } = JSON.parse(text);
    return version === 1 ? conversations.map(restored).filter(Boolean) : null;
  } catch {
    return null;
  }
}
