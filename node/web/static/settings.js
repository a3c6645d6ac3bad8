// Dialogs: settings, and the API key.

import { h } from "./dom.js";

const KEYS = "Enter sends, Shift+Enter begins a line, Escape stops an answer, Ctrl+Shift+O begins a chat.";

let fields = 0;

function field(label, input, note = "") {
  const id = `field-${(fields += 1)}`;
  input.id = id;
  if (note) input.setAttribute("aria-describedby", `${id}-note`);
  return h(
    "div",
    { class: "field" },
    h("label", { for: id }, label),
    input,
    note ? h("p", { class: "note", id: `${id}-note` }, note) : null,
  );
}

/** Shows a form as a dialog; resolves to what `read()` gives, or null if it was left. */
function asked(title, parts, read, confirm) {
  const form = h("form", { method: "dialog" });
  const heading = h("h2", { id: "dialog-title" }, title);
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
  const cancel = h("button", { type: "button", class: "plain", onclick: () => dialog.close("") }, "Cancel");
  form.append(heading, ...parts, h("div", { class: "buttons" }, cancel, h("button", { type: "submit", class: "primary", value: "yes" }, confirm)));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(dialog.returnValue === "yes" ? read() : null);
      dialog.remove();
    });
  });
}

function number(value, attrs) {
  return h("input", { type: "number", value: value ?? "", ...attrs });
}

function keyFields(page) {
  const key = h("input", { type: "password", value: page.key, autocomplete: "off", spellcheck: "false" });
  const remember = h("input", { type: "checkbox", id: "remember-key" });
  const kept = h("div", { class: "check" }, remember, h("label", { for: "remember-key" }, "Keep it in this browser"));
  return { key, remember, kept };
}

export function askForKey(page, wrong) {
  const { key, remember, kept } = keyFields(page);
  const { name, made, missing, wrong: unknown } = page.client.keyed;
  return asked(
    name,
    [h("p", {}, wrong ? unknown : missing), field(name, key, made), kept],
    () => ({ key: key.value.trim(), remember: remember.checked }),
    "Use it",
  );
}

/** Chats go to a file, and come from one. */
function chatsField(page) {
  const told = h("p", { class: "note", role: "status" }, "They are kept in this browser only.");
  const file = h("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "A file of chats" });
  file.addEventListener("change", async () => {
    if (file.files[0]) told.textContent = await page.import(file.files[0]);
    file.value = "";
  });
  const save = h("button", { type: "button", class: "plain", onclick: () => page.export() }, "Export all");
  const read = h("button", { type: "button", class: "plain", onclick: () => file.click() }, "Import a file");
  return h("div", { class: "field", role: "group", "aria-label": "Your chats" }, h("p", { class: "name" }, "Your chats"), h("div", { class: "row" }, save, read, file), told);
}

export function openSettings(page) {
  const { settings, current } = page;
  const system = h("textarea", { rows: 4 });
  system.value = current.system;
  const temperature = number(settings.temperature, { min: 0, max: 2, step: 0.1, required: true });
  const topP = number(settings.top_p, { min: 0.01, max: 1, step: 0.01, required: true });
  const tokens = number(settings.max_tokens, { min: 1, step: 1, required: true });
  const seed = number(settings.seed, { min: 0, step: 1 });
  const theme = h(
    "select",
    {},
    [["auto", "As the system"], ["light", "Light"], ["dark", "Dark"]].map(([value, text]) =>
      h("option", { value, selected: settings.theme === value }, text),
    ),
  );
  const { key, remember, kept } = keyFields(page);
  const chats = chatsField(page);
  return asked(
    "Settings",
    [
      field("Instructions for the model", system, "What it should always keep to, for example “Answer in French”: in this chat and in new ones. (System prompt)"),
      h(
        "div",
        { class: "pair" },
        field("Variety", temperature, "0 says the likeliest every time, 0.7 is lively, above 1 it gets odd. (Temperature)"),
        field("Choice of words", topP, "1 allows all words, 0.9 leaves out the unlikeliest tenth. (Top p)"),
        field("Longest answer", tokens, "In tokens: three words take about four."),
        field("Repeatable", seed, "With a number, the same question has the same answer. Empty: a new one each time. (Seed)"),
      ),
      field("Colours", theme),
      chats,
      field(page.client.keyed.name, key, page.client.keyed.note),
      kept,
      h("p", { class: "note" }, KEYS),
    ],
    () => ({
      system: system.value,
      temperature: Number(temperature.value),
      top_p: Number(topP.value),
      max_tokens: Number(tokens.value),
      seed: seed.value === "" ? null : Number(seed.value),
      theme: theme.value,
      key: key.value.trim(),
      remember: remember.checked,
    }),
    "Save",
  );
}
