// Where conversations stay: IndexedDB of this browser. Without it (some private windows) they last as long as the page.

import { restored } from "./conversations.js";

const NAME = "petalnode";
const STORE = "conversations";

export class Storage {
  #database = null;
  #memory = new Map(); // those that the database has not, or not so
  #channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;

  /** Whether conversations outlive the page. */
  get lasts() {
    return this.#database !== null;
  }

  async open() {
    try {
      this.#database = await new Promise((resolve, reject) => {
        const request = indexedDB.open(NAME, 1);
        request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
        request.onsuccess = () => resolve(request.result);
        request.onerror = () => reject(request.error);
      });
    } catch {
      this.#database = null;
    }
    return this;
  }

  /** Calls `listener(id)` when another tab has changed a conversation. */
  onChange(listener) {
    if (this.#channel) this.#channel.onmessage = (event) => listener(String(event.data));
  }

  /** All conversations, the last one used first. */
  async all() {
    const kept = this.#database ? await this.#run("readonly", (store) => store.getAll()) : [];
    // `restored` stops answers: what is in memory goes on being answered.
    const found = [...kept.filter(({ id }) => !this.#memory.has(id)), ...structuredClone([...this.#memory.values()])];
    return found.map(restored).filter(Boolean).sort((one, other) => other.updated - one.updated);
  }

  async put(conversation) {
    this.#memory.set(conversation.id, conversation);
    if (this.#database) {
      await this.#run("readwrite", (store) => store.put(conversation)); // throws where there is no room
      this.#memory.delete(conversation.id);
    }
    this.#channel?.postMessage(conversation.id);
  }

  async remove(id) {
    this.#memory.delete(id);
    if (this.#database) await this.#run("readwrite", (store) => store.delete(id));
    this.#channel?.postMessage(id);
  }

  #run(mode, work) {
    return new Promise((resolve, reject) => {
      const transaction = this.#database.transaction(STORE, mode);
      const request = work(transaction.objectStore(STORE));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}

const SETTINGS = "petalnode-settings";
const KEY = "petalnode-key";

export const DEFAULTS = { model: "", system: "", temperature: 0.7, top_p: 1, max_tokens: 512, seed: null, theme: "auto" };

/** The settings; those of an older page are completed. */
export function loadSettings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) ?? "{}") };
  } catch {
    return { ...DEFAULTS };
  }
}

export function saveSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // They last as long as the page.
  }
}

/** The API key, kept as long as the tab, or in this browser if the person wants that. */
export function loadKey() {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export function saveKey(key, remember) {
  try {
    sessionStorage.setItem(KEY, key);
    if (remember && key) localStorage.setItem(KEY, key);
    else localStorage.removeItem(KEY);
  } catch {
    // It lasts as long as the page.
  }
}
