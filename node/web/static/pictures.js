// Pictures of a question: which are taken, and how large they are sent. They are drawn, never loaded: no address is asked.

import { h, iconButton } from "./dom.js";

/** With eight pictures of this number of characters and some text, a request is below the mebibyte that `petalnode api` takes. */
export const PICTURES = { count: 8, bytes: 32 << 20, characters: 110000, sides: [1024, 768, 512, 384, 256] };
const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const URL_START = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/;

/** Whether a text is a picture as the page keeps it. */
export function isPicture(text) {
  return typeof text === "string" && text.length <= PICTURES.characters && URL_START.test(text);
}

/** The pictures that a message from storage or a file may have; of others, none. */
export function kept(pictures) {
  return Array.isArray(pictures) && pictures.length <= PICTURES.count && pictures.every(isPicture) ? pictures : [];
}

/** Those of some files that are taken beside `held` others, and why the rest is not ("" if there is none). */
export function chosen(files, held) {
  const pictures = [...files].filter(({ type }) => KINDS.includes(type));
  if (!pictures.length) return { files: [], why: files.length ? "Pictures are PNG, JPEG, WEBP or GIF." : "" };
  const small = pictures.filter(({ size }) => size <= PICTURES.bytes);
  const taken = small.slice(0, Math.max(0, PICTURES.count - held));
  if (taken.length < small.length) return { files: taken, why: `A chat has ${PICTURES.count} pictures at most.` };
  return { files: taken, why: small.length < pictures.length ? `A picture has ${PICTURES.bytes >> 20} MB at most.` : "" };
}

/** A message's content as it is sent. */
export function withPictures(content, pictures) {
  if (!pictures?.length) return content;
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
}

/** A file's picture as a data URL, made as small as it has to be; null if it is none. */
export async function read(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return null;
  for (const side of PICTURES.sides) {
    const url = drawnAt(bitmap, side).toDataURL("image/jpeg", 0.85);
    if (isPicture(url)) return url;
  }
  return null;
}

/** A picture of at most `side` pixels a side, on white. */
function drawnAt(bitmap, side) {
  const scale = Math.min(1, side / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((length) => Math.max(1, Math.round(length * scale)));
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas;
}

/** Pictures one beside the other; with `remove`, each has a button that calls it with its number. */
export function shown(pictures, remove = null) {
  return pictures.map((url, index) => {
    const name = `Picture ${index + 1}`;
    const canvas = h("canvas", { role: "img", "aria-label": name, width: 1, height: 1 });
    paint(canvas, url);
    return h("span", { class: "picture" }, canvas, remove && iconButton("close", `Remove picture ${index + 1}`, () => remove(index)));
  });
}

async function paint(canvas, url) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (char) => char.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([bytes])).catch(() => null);
  if (!bitmap) return;
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
}
