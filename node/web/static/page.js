// The page: conversations at the left, the chat or the swarm at the right.

import { Client } from "./client.js";
import { exported, imported, mentions, newConversation } from "./conversations.js";
import { drawn, h, iconButton } from "./dom.js";
import { askForKey, openSettings } from "./settings.js";
import { loadKey, loadSettings, saveKey, saveSettings, Storage } from "./storage.js";
import { numbered, sentence, shortPeer } from "./text.js";
import "./chat.js";
import { answering } from "./swarm.js";

const SWARM_SECONDS = 4;
const MAX_IMPORT = 64e6; // bytes
const FULL = "This browser has no room left for conversations: delete some.";

class Page extends HTMLElement {
  async connectedCallback() {
    this.settings = loadSettings();
    this.key = loadKey();
    this.client ??= new Client(document.baseURI, () => this.key); // or what clients/js/chat asks
    this.names = new Map();
    this.models = [];
    this.conversations = [];
    this.#paintTheme();
    this.#build();
    this.storage = await new Storage().open();
    this.storage.onChange(() => this.#reload());
    await this.#reload();
    this.show(this.conversations[0] ?? null);
    addEventListener("hashchange", () => this.#showView());
    addEventListener("keydown", (event) => this.#onKey(event));
    matchMedia("(max-width: 760px)").addEventListener("change", () => this.#drawer(false));
    document.addEventListener("visibilitychange", () => this.#pollSwarm());
    this.#showView();
    if (!this.chat.hidden) this.chat.focusQuestion();
    await this.#loadModels();
    await this.#pollSwarm();
    this.dataset.ready = "";
  }

  #build() {
    this.list = h("ul", { class: "conversations" });
    this.search = h("input", { type: "search", class: "search", "aria-label": "Search your chats", placeholder: "Search your chats", oninput: () => this.#paintList() });
    this.swarmLine = h("span", { class: "swarm-line" }, "Swarm");
    this.links = {
      chat: h("a", { href: "#chat", class: "view" }, drawn("chat"), "Chat"),
      swarm: h("a", { href: "#swarm", class: "view" }, drawn("swarm"), this.swarmLine),
    };
    this.side = h(
      "nav",
      { id: "side", "aria-label": "Conversations" },
      h(
        "div",
        { class: "brand" },
        h("img", { src: "web/icon.svg", alt: "", width: 26, height: 26 }),
        h("span", { class: "brand-name" }, "petalnode"),
        iconButton("close", "Close the menu", () => this.#drawer(false), { class: "icon only-small" }),
      ),
      h("button", { type: "button", class: "new", onclick: () => this.begin() }, drawn("plus"), "New chat"),
      this.search,
      h("div", { class: "scroll", tabindex: "-1" }, this.list),
      h(
        "div",
        { class: "side-foot" },
        this.links.chat,
        this.links.swarm,
        h("button", { type: "button", class: "view", onclick: () => this.#settings() }, drawn("gear"), "Settings"),
      ),
    );
    this.menu = iconButton("menu", "Conversations and settings", () => this.#drawer(true), {
      class: "icon only-small",
      "aria-expanded": "false",
      "aria-controls": "side",
    });
    this.picker = h("select", { "aria-label": "Model", onchange: () => this.#choose(this.picker.value) });
    this.heading = h("h1", {}, "Chat");
    this.chat = h("pn-chat", {});
    this.swarm = h("pn-swarm", { hidden: true });
    this.notice = h("div", { class: "notice", role: "alert", hidden: true });
    this.veil = h("div", { class: "veil", hidden: true, onclick: () => this.#drawer(false) });
    this.main = h(
      "main",
      {},
      h("header", {}, this.menu, this.heading, this.picker),
      this.notice,
      this.chat,
      this.swarm,
    );
    this.append(h("a", { href: "#question", class: "skip", onclick: (event) => this.#skip(event) }, "Skip to the question"));
    this.append(this.side, this.veil, this.main);
    this.chat.page = this;
    this.swarm.page = this;
    this.#drawer(false);
  }

  /** A server's name: the one it goes by, or the end of its peer id. */
  name = (peer) => this.names.get(peer) || shortPeer(peer);

  // --- conversations

  /** Begins a conversation; it is kept once something was asked. */
  begin() {
    this.show(null);
    location.hash = "#chat";
    this.#drawer(false);
    this.chat.focusQuestion();
  }

  show(conversation) {
    this.current = conversation ?? newConversation(Date.now(), this.settings.system);
    this.chat.show(this.current);
    this.#paintList();
    this.#paintHeading();
  }

  /** Keeps a conversation that has changed. */
  async keep(conversation) {
    if (conversation.removed) return; // while it was answered
    if (!this.conversations.includes(conversation)) this.conversations.unshift(conversation);
    this.conversations.sort((one, other) => other.updated - one.updated);
    this.#paintList();
    this.#paintHeading();
    try {
      await this.storage.put(conversation);
    } catch {
      this.tell(FULL);
    }
  }

  async #reload() {
    const busy = this.conversations.filter((one) => this.chat.isAnswering(one));
    const stored = await this.storage.all();
    const current = stored.find(({ id }) => id === this.current?.id);
    // Another tab has gone on with it. What is held here for the next question stays.
    if (current?.updated > this.current?.updated && !busy.includes(this.current)) this.show(Object.assign(this.current, current));
    const keep = new Map([...busy, this.current].filter(Boolean).map((one) => [one.id, one]));
    this.conversations = stored.map((one) => keep.get(one.id) ?? one);
    this.#paintList();
  }

  async #remove(conversation) {
    if (!confirm(`Delete “${conversation.title || "New chat"}”?`)) return;
    conversation.removed = true;
    this.chat.stopIn(conversation);
    this.conversations = this.conversations.filter((one) => one !== conversation);
    await this.storage.remove(conversation.id);
    if (this.current === conversation) this.show(this.conversations[0] ?? null);
    else this.#paintList();
  }

  /** Gives a conversation another name, in the place where it stands. */
  #rename(conversation, item) {
    const input = h("input", { "aria-label": "Name of the chat", maxlength: 160 });
    input.value = conversation.title;
    const done = (keeps) => {
      if (this.renaming !== input) return;
      this.renaming = null;
      if (keeps) conversation.title = input.value.trim() || conversation.title;
      if (keeps) this.keep(conversation);
      else this.#paintList();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Escape" || event.key === "Enter") done(event.key === "Enter");
    });
    input.addEventListener("blur", () => done(true));
    this.renaming = input;
    item.replaceChildren(input);
    input.select();
  }

  /** All chats as a file. */
  export() {
    const url = URL.createObjectURL(new Blob([exported(this.conversations)], { type: "application/json" }));
    h("a", { href: url, download: "petalnode-chats.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  /** Takes in the chats of a file; of one that is here too, the newer stays. Resolves to what a person is told. */
  async import(file) {
    const found = file.size > MAX_IMPORT ? null : imported(await file.text());
    if (!found) return "This file has no chats that were exported here.";
    const here = new Map(this.conversations.map((one) => [one.id, one.updated]));
    const newer = found.filter(({ id, updated }) => !here.has(id) || here.get(id) < updated);
    for (const one of newer) await this.storage.put(one).catch(() => this.tell(FULL));
    await this.#reload();
    const chats = (number) => numbered(number, "chat");
    return `${chats(newer.length)} taken in${newer.length < found.length ? `; ${chats(found.length - newer.length)} were here already` : ""}.`;
  }

  #paintList() {
    if (this.renaming?.isConnected) return;
    const wanted = this.search.value;
    this.search.hidden = this.conversations.length < 2 && !wanted;
    const shown = wanted.trim() ? this.conversations.filter((one) => mentions(one, wanted)) : this.conversations;
    const items = shown.map((one) => {
      const title = one.title || "New chat";
      const current = one === this.current;
      const open = h(
        "button",
        {
          type: "button",
          class: "open",
          title,
          "aria-current": current ? "true" : null,
          onclick: () => {
            this.show(one);
            location.hash = "#chat";
            this.#drawer(false);
          },
        },
        title,
      );
      const rename = iconButton("edit", `Rename ${title}`, () => this.#rename(one, rename.parentElement));
      return h("li", { class: current ? "current" : null }, open, rename, iconButton("trash", `Delete ${title}`, () => this.#remove(one)));
    });
    if (wanted && !items.length) items.push(h("li", { class: "note none" }, "No chat has this text."));
    this.list.replaceChildren(...items);
  }

  // --- models, the swarm, settings

  async #loadModels() {
    try {
      this.models = await this.client.models();
      this.tell("");
    } catch (error) {
      if (error.status === 401) return this.#askKey();
      return this.tell(error.message, () => this.#loadModels());
    }
    const options = this.models.map(({ id }) => h("option", { value: id }, id));
    const others = options.length > 1 ? [h("optgroup", { label: this.client.others }, options.slice(1))] : [];
    this.picker.replaceChildren(...options.slice(0, 1), ...others);
    this.takesPictures = this.models[0].input_modalities?.includes("image") ?? false;
    this.chat.learntPictures();
    const known = this.models.some(({ id }) => id === this.settings.model);
    this.#choose(known ? this.settings.model : this.models[0].id);
  }

  #choose(model) {
    this.picker.value = model;
    this.settings.model = model;
    saveSettings(this.settings);
  }

  async #askKey() {
    const given = await askForKey(this, Boolean(this.key));
    if (!given) return this.tell(`${this.client.keyed.missing} Open Settings to enter one.`);
    this.#setKey(given);
  }

  #setKey({ key, remember }) {
    this.key = key;
    saveKey(key, remember);
    this.#loadModels();
    this.#pollSwarm();
  }

  async #settings() {
    const given = await openSettings(this);
    if (!given) return;
    const { key, remember, system, ...settings } = given;
    Object.assign(this.settings, settings, { system });
    saveSettings(this.settings);
    this.current.system = system;
    if (this.conversations.includes(this.current)) this.keep(this.current);
    this.#paintTheme();
    if (key !== this.key || remember) this.#setKey({ key, remember });
  }

  #paintTheme() {
    if (this.settings.theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = this.settings.theme;
  }

  async #pollSwarm() {
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return;
    try {
      const swarm = await this.client.swarm();
      for (const server of swarm.servers) if (server.name) this.names.set(server.peer_id, server.name);
      const missing = swarm.missing_blocks.length > 0;
      this.swarmLine.textContent = `Swarm: ${answering(swarm.servers)}`;
      this.links.swarm.classList.toggle("bad", missing);
      if (missing) this.swarmLine.textContent += ", blocks missing";
      this.swarm.show(swarm);
      this.chat.learnt();
      if (this.lost) await this.#loadModels();
      this.lost = false;
    } catch (error) {
      this.lost = error.status !== 401;
      this.links.swarm.classList.add("bad");
      this.swarmLine.textContent = this.lost ? "Swarm: no answer" : `Swarm: needs ${this.client.keyed.a}`;
      this.swarm.fail(error.message);
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#pollSwarm(), SWARM_SECONDS * 1000);
  }

  // --- views

  #showView() {
    const swarm = location.hash === "#swarm";
    const changed = this.swarm.hidden === swarm;
    this.chat.hidden = swarm;
    this.swarm.hidden = !swarm;
    this.picker.hidden = swarm;
    for (const [name, link] of Object.entries(this.links)) {
      if ((name === "swarm") === swarm) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.#drawer(false);
    this.#paintHeading();
    if (changed && this.dataset.ready !== undefined) this.#pollSwarm();
  }

  #paintHeading() {
    this.heading.textContent = this.chat.hidden ? "Swarm" : this.current?.title || "New chat";
    document.title = `${this.heading.textContent} · petalnode`;
  }

  #drawer(open) {
    const small = matchMedia("(max-width: 760px)").matches;
    const was = this.side.classList.contains("open");
    this.side.classList.toggle("open", open && small);
    this.side.inert = small && !open;
    this.main.inert = small && open;
    this.veil.hidden = !(small && open);
    this.menu.setAttribute("aria-expanded", String(open && small));
    if (open && small) this.side.querySelector("button.new").focus();
    else if (was) this.menu.focus();
  }

  #onKey(event) {
    if (event.key === "Escape") {
      if (this.side.classList.contains("open")) this.#drawer(false);
      else if (!document.querySelector("dialog[open]")) this.chat.stopIn(this.current);
    } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.begin();
    }
  }

  #skip(event) {
    event.preventDefault();
    location.hash = "#chat";
    this.chat.focusQuestion();
  }

  /** Shows a notice above the chat, with a button for `again` if it is given; "" takes it away. */
  tell(text, again = null) {
    this.notice.hidden = !text;
    const button = h("button", { type: "button", class: "plain small", onclick: () => (this.tell(""), again()) }, "Try again");
    this.notice.replaceChildren(text && sentence(text, this.name), ...(again ? [" ", h("a", { href: "#swarm" }, "Look at the swarm"), button] : []));
  }
}

customElements.define("pn-page", Page);
