// <pn-chat>: the messages of a conversation, the question, and answers as they come.

import { add, branches, messagesTo, path, turn } from "./conversations.js";
import { copied, drawn, h, iconButton, keyed, patched } from "./dom.js";
import { parse } from "./markdown.js";
import { paintRoute } from "./hops.js";
import { chosen, read, shown } from "./pictures.js";
import { followed, named, NO_ROUTE, spoken } from "./route.js";
import { sentence } from "./text.js";

const NEAR = 80; // pixels from the end at which the view follows the answer
const SAVE_MILLISECONDS = 1000;
const EXAMPLES = [
  "What is the capital of France?",
  "Explain in three sentences how a swarm can run one language model.",
  "Write a Python function that reverses a string.",
];

class Chat extends HTMLElement {
  #answers = new Map(); // of message ids: {controller, conversation}
  #cards = new Map(); // of message ids: what is drawn of them
  #frame = 0;
  #dirty = new Set();

  connectedCallback() {
    this.list = h("ol", { class: "messages", "aria-label": "Messages" });
    this.scroll = h("div", { class: "scroll messages-scroll", tabindex: "-1" }, this.list);
    this.live = h("div", { class: "unseen", role: "status", "aria-live": "polite" });
    this.question = h("textarea", {
      id: "question",
      rows: 1,
      "aria-label": "Your question",
      placeholder: "Ask the swarm",
      oninput: () => this.#grow(this.question),
      onkeydown: (event) => this.#onKey(event),
      onpaste: (event) => this.#take(event, event.clipboardData),
    });
    this.pictures = [];
    this.tray = h("div", { class: "pictures", role: "group", "aria-label": "Pictures of the question", hidden: true });
    this.file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => this.#add(this.file.files) });
    this.picture = iconButton("picture", "Add a picture", () => this.file.click(), { hidden: true });
    this.send = h("button", { type: "submit", class: "icon send", title: "Send", "aria-label": "Send" }, drawn("send"));
    this.stop = iconButton("stop", "Stop the answer", () => this.stopIn(this.conversation), { class: "icon send stop", hidden: true });
    const row = h("div", { class: "row" }, this.picture, this.file, this.question, this.stop, this.send);
    const form = h("form", { class: "ask", onsubmit: (event) => this.#submit(event) }, this.tray, row);
    this.addEventListener("dragover", (event) => this.page.takesPictures && event.preventDefault());
    this.addEventListener("drop", (event) => this.#take(event, event.dataTransfer));
    this.append(this.scroll, this.live, form);
  }

  show(conversation) {
    if (conversation !== this.conversation) this.#hold([]);
    this.conversation = conversation;
    this.#cards.clear();
    this.#paintAll();
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  focusQuestion() {
    this.question.focus();
  }

  /** Servers have said their names: routes keep them. */
  learnt() {
    for (const node of this.conversation ? path(this.conversation) : []) {
      const known = node.route && named(node.route, this.page.names);
      if (!known || known === node.route) continue;
      node.route = known;
      if (this.#cards.has(node.id)) this.#paint(node);
    }
  }

  isAnswering(conversation) {
    return [...this.#answers.values()].some((answer) => answer.conversation === conversation);
  }

  stopIn(conversation) {
    for (const answer of this.#answers.values()) if (answer.conversation === conversation) answer.controller.abort();
  }

  // --- asking

  #onKey(event) {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
    if (!sends) return;
    event.preventDefault();
    this.question.form.requestSubmit();
  }

  #submit(event) {
    event.preventDefault();
    const text = this.question.value.trim();
    if (!(text || this.pictures.length) || this.isAnswering(this.conversation)) return;
    this.question.value = "";
    this.#grow(this.question);
    this.ask(text);
  }

  /** Asks behind what is shown, with the pictures that are held. */
  ask(text) {
    const before = path(this.conversation).at(-1);
    const node = add(this.conversation, before?.id ?? null, "user", text, Date.now(), this.pictures);
    this.#hold([]);
    return this.#answer(this.conversation, node.id);
  }

  // --- pictures

  /** Whether the model takes any. */
  learntPictures() {
    this.picture.hidden = !this.page.takesPictures;
  }

  /** Takes files that were pasted or dropped. */
  #take(event, { files }) {
    if (!this.page.takesPictures || !files.length) return;
    event.preventDefault();
    this.#add(files);
  }

  async #add(files) {
    const { conversation } = this;
    const asked = path(conversation).reduce((count, node) => count + (node.pictures?.length ?? 0), 0);
    const { files: taken, why } = chosen(files, this.pictures.length + asked);
    const found = await Promise.all(taken.map(read));
    this.file.value = "";
    if (conversation !== this.conversation) return;
    this.#hold([...this.pictures, ...found.filter(Boolean)]);
    const wrong = why || (found.includes(null) && "A picture could not be opened.");
    this.page.tell(wrong || "");
    if (!wrong) this.#say(`${this.pictures.length} pictures go with the question.`);
    this.question.focus();
  }

  #hold(pictures) {
    this.pictures = pictures;
    this.tray.hidden = !pictures.length;
    this.tray.replaceChildren(...shown(pictures, (index) => this.#hold(pictures.filter((_, at) => at !== index))));
  }

  async #answer(conversation, asked) {
    const { page } = this;
    const node = add(conversation, asked, "assistant", "", Date.now());
    node.state = "answering";
    node.route = NO_ROUTE;
    node.model = page.settings.model;
    const controller = new AbortController();
    this.#answers.set(node.id, { controller, conversation });
    this.#paintAll();
    this.scroll.scrollTop = this.scroll.scrollHeight;
    page.keep(conversation);
    this.#say("Answering.");
    const begun = performance.now();
    let saved = begun;
    const onChunk = (chunk) => {
      if (controller.signal.aborted) return;
      node.content += chunk.choices[0]?.delta?.content ?? "";
      const before = node.route;
      node.route = named(followed(before, chunk), page.names);
      if (chunk.choices[0]?.finish_reason) node.reason = chunk.choices[0].finish_reason;
      this.#say(before === node.route ? null : spoken(before, node.route, page.name));
      this.#mark(node);
      if (performance.now() - saved > SAVE_MILLISECONDS) {
        saved = performance.now();
        page.storage.put(conversation).catch(() => {});
      }
    };
    try {
      await page.client.chat(this.#request(conversation, asked), { signal: controller.signal, onChunk });
      node.state = controller.signal.aborted ? "stopped" : "done";
    } catch (error) {
      node.state = "failed";
      node.error = sentence(error.message, page.name);
    }
    node.seconds = (performance.now() - begun) / 1000;
    if (node.route.waiting) node.route = { ...node.route, waiting: null };
    conversation.updated = Date.now();
    this.#answers.delete(node.id);
    this.#say({ done: "The answer is complete.", stopped: "Stopped.", failed: node.error }[node.state]);
    if (this.conversation === conversation) this.#paintAll();
    await page.keep(conversation);
  }

  #request(conversation, asked) {
    const { model, temperature, top_p, max_tokens, seed } = this.page.settings;
    const body = { model, messages: messagesTo(conversation, asked), temperature, top_p, max_tokens };
    return seed === null ? body : { ...body, seed };
  }

  #say(text) {
    if (text) this.live.textContent = text;
  }

  // --- drawing

  /** Draws a message anew at the next frame. */
  #mark(node) {
    this.#dirty.add(node);
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      const { scrollTop, scrollHeight, clientHeight } = this.scroll;
      const follows = scrollHeight - scrollTop - clientHeight < NEAR;
      for (const one of this.#dirty) if (this.#cards.has(one.id)) this.#paint(one);
      this.#dirty.clear();
      if (follows) this.scroll.scrollTop = this.scroll.scrollHeight;
    });
  }

  #paintAll() {
    const messages = path(this.conversation);
    const answering = this.isAnswering(this.conversation);
    this.stop.hidden = !answering;
    this.send.hidden = answering;
    if (!messages.length) {
      this.#cards.clear();
      this.list.replaceChildren(this.#welcome());
      return;
    }
    const kept = new Map();
    for (const node of messages) kept.set(node.id, this.#cards.get(node.id) ?? this.#card(node));
    this.#cards = kept;
    const wanted = [...kept.values()].map((card) => card.item);
    const present = [...this.list.children];
    if (wanted.length !== present.length || wanted.some((item, index) => item !== present[index])) {
      this.list.replaceChildren(...wanted);
    }
    for (const node of messages) this.#paint(node);
  }

  #welcome() {
    const examples = EXAMPLES.map((text) =>
      h("button", { type: "button", class: "example", onclick: () => this.ask(text) }, text),
    );
    return h(
      "li",
      { class: "welcome" },
      h("img", { src: "web/icon.svg", alt: "", width: 64, height: 64 }),
      h("h2", {}, "Ask the swarm"),
      h("p", {}, "Every word passes through several machines, each of which holds some blocks of the model. Below each answer you see its route. The machines can read along."),
      h("div", { class: "examples" }, examples),
    );
  }

  #card(node) {
    const body = h("div", { class: "body" });
    const route = h("div", { class: "route" });
    const foot = h("div", { class: "foot" });
    const who = node.role === "user" ? "You" : node.model || "Answer";
    const pictures = node.pictures?.length ? h("div", { class: "pictures" }, shown(node.pictures)) : null;
    const item = h("li", { class: `message ${node.role}` }, h("h2", { class: "who" }, who), pictures, body, route, foot);
    return { item, body, route, foot, keys: [], drawn: "" };
  }

  #paint(node) {
    const card = this.#cards.get(node.id);
    if (card.editing) return;
    if (node.role === "user") {
      card.body.textContent = node.content;
    } else {
      card.keys = patched(card.body, card.keys, keyed(parse(node.content)));
      card.body.classList.toggle("writing", node.state === "answering");
      card.item.setAttribute("aria-busy", String(node.state === "answering"));
      paintRoute(card.route, node, this.page.name, { save: () => this.#receipts(node), check: () => this.#check(node) });
    }
    this.#paintFoot(node, card);
  }

  #paintFoot(node, card) {
    const { ids, index } = branches(this.conversation, node.id);
    const busy = this.isAnswering(this.conversation);
    const drawing = JSON.stringify([node.state, node.error, node.reason, ids.length, index, busy]);
    if (drawing === card.drawn) return;
    card.drawn = drawing;
    const parts = [];
    if (node.state === "failed") {
      const again = h("button", { type: "button", class: "plain small", disabled: busy, onclick: () => this.#answer(this.conversation, node.parent) }, "Try again");
      parts.push(h("p", { class: "failed" }, node.error, " ", h("a", { href: "#swarm" }, "Look at the swarm"), again));
    }
    if (node.state === "stopped") parts.push(h("span", { class: "note" }, "Stopped"));
    if (node.state === "done" && node.reason === "length") parts.push(h("span", { class: "note" }, "Cut off: it may have no more tokens"));
    if (ids.length > 1) parts.push(this.#switcher(node, ids.length, index, busy));
    if (node.role === "user") {
      parts.push(iconButton("edit", "Edit this question", () => this.#edit(node), { disabled: busy }));
    } else if (node.state !== "answering") {
      const copy = iconButton("copy", "Copy this answer", () => copied(node.content, copy));
      parts.push(copy, iconButton("again", "Answer again", () => this.#answer(this.conversation, node.parent), { disabled: busy }));
    }
    card.foot.replaceChildren(...parts);
  }

  #switcher(node, length, index, busy) {
    const go = (step) => {
      turn(this.conversation, node.id, step);
      this.#paintAll();
      this.page.keep(this.conversation);
      this.#say(`Version ${index + 1 + step} of ${length}.`);
    };
    return h(
      "span",
      { class: "branches", role: "group", "aria-label": "Versions" },
      iconButton("left", "The version before", () => go(-1), { disabled: busy || index === 0 }),
      h("span", {}, `${index + 1} / ${length}`),
      iconButton("right", "The next version", () => go(1), { disabled: busy || index === length - 1 }),
    );
  }

  #edit(node) {
    const card = this.#cards.get(node.id);
    const text = h("textarea", { "aria-label": "Edit your question", oninput: () => this.#grow(text) });
    text.value = node.content;
    const done = () => {
      card.editing = false;
      card.drawn = "";
      this.#paint(node);
      card.foot.hidden = false;
    };
    const send = () => {
      if (!text.value.trim() || this.isAnswering(this.conversation)) return;
      card.editing = false;
      card.foot.hidden = false;
      const edited = add(this.conversation, node.parent, "user", text.value.trim(), Date.now(), node.pictures);
      this.#cards.delete(node.id);
      this.#answer(this.conversation, edited.id);
      this.focusQuestion();
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        send();
      }
    });
    card.editing = true;
    card.foot.hidden = true;
    const cancel = h("button", { type: "button", class: "plain", onclick: done }, "Cancel");
    const ask = h("button", { type: "button", class: "primary", onclick: send }, "Ask this");
    card.body.replaceChildren(text, h("div", { class: "buttons" }, cancel, ask));
    this.#grow(text);
    text.focus();
  }

  async #receipts(node) {
    const { client } = this.page;
    try {
      const receipts = await client.receipts(node.route.receipts.id);
      const url = URL.createObjectURL(new Blob([JSON.stringify(receipts)], { type: "application/json" }));
      h("a", { href: url, download: "receipts.json" }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10000);
    } catch (error) {
      this.#say(error.message);
      this.page.tell(error.message, () => this.#receipts(node));
    }
  }

  async #check(node) {
    const { receipts } = node.route;
    try {
      node.route = { ...node.route, receipts: { ...receipts, checked: await this.page.client.check(receipts.id) } };
      this.#paint(node);
    } catch (error) {
      this.#say(error.message);
      this.page.tell(error.message, () => this.#check(node));
    }
  }

  #grow(area) {
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
  }
}

customElements.define("pn-chat", Chat);
