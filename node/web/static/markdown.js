// Markdown as a tree of plain objects, never HTML: {tag, attrs, children}, or text. What a model writes can therefore
// become only the elements that this file names. No DOM here, so it runs in tests as it is.
//
// Every loop goes forward and every search is bounded, so a text takes time in proportion to its length.

import { formula } from "./formula.js";

const MAX_DEPTH = 8;
const MAX_MARKS = 12;
const MAX_LABEL = 500;
const MAX_URL = 2000;
const MAX_COLUMNS = 32;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

const element = (tag, children, attrs = {}) => ({ tag, attrs, children });

/** The blocks of a text: objects {tag, attrs, children} in which children are such objects or strings. */
export function parse(text) {
  return blocks(String(text).replace(/\r\n?/g, "\n").split("\n"), 0);
}

/** A link's address if it may be followed: absolute, of the web or of mail, without a user name; else null. */
export function safeUrl(text) {
  if (text.length > MAX_URL) return null;
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return PROTOCOLS.has(url.protocol) && !url.username && !url.password ? url.href : null;
}

// --- blocks

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const reader = READERS.find((one) => one.starts(lines, at, depth)) ?? paragraph;
    const [block, next] = reader.read(lines, at, depth);
    found.push(block);
    at = next;
  }
  return found;
}

const fence = {
  pattern: /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/,
  starts: (lines, at) => fence.pattern.test(lines[at]),
  // One that is not closed goes to the end: it is still being written.
  read(lines, at) {
    const [, mark, language] = fence.pattern.exec(lines[at]);
    const body = [];
    let next = at + 1;
    for (; next < lines.length; next += 1) {
      const line = lines[next].trim();
      if (line.startsWith(mark) && line === mark[0].repeat(line.length)) {
        next += 1;
        break;
      }
      body.push(lines[next]);
    }
    return [element("pre", [element("code", [body.join("\n")])], { language }), next];
  },
};

const heading = {
  pattern: /^ {0,3}(#{1,6})\s+(.*)$/,
  starts: (lines, at) => heading.pattern.test(lines[at]),
  read(lines, at) {
    const [, marks, text] = heading.pattern.exec(lines[at]);
    // The page has headings 1 and 2 of its own.
    const level = Math.min(6, marks.length + 2);
    return [element(`h${level}`, inline(withoutClosingMarks(text))), at + 1];
  },
};

function withoutClosingMarks(text) {
  let end = text.trimEnd().length;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return text.slice(0, end).trim();
}

const rule = {
  starts: (lines, at) => {
    const bare = lines[at].replace(/\s/g, "");
    return bare.length >= 3 && "-*_".includes(bare[0]) && bare === bare[0].repeat(bare.length);
  },
  read: (lines, at) => [element("hr", []), at + 1],
};

const quote = {
  starts: (lines, at, depth) => depth < MAX_DEPTH && /^ {0,3}>/.test(lines[at]),
  read(lines, at, depth) {
    const inner = [];
    let next = at;
    while (next < lines.length && /^ {0,3}>/.test(lines[next])) {
      inner.push(lines[next].replace(/^ {0,3}> ?/, ""));
      next += 1;
    }
    return [element("blockquote", blocks(inner, depth + 1)), next];
  },
};

const CLOSED_BY = { "$$": "$$", $: "$", "\\(": "\\)", "\\[": "\\]" };

/** A formula between $$ or \[ and \], on lines of its own. One that is not closed goes to a blank line, or the end. */
const display = {
  pattern: /^ {0,3}(\$\$|\\\[)(.*)$/,
  starts(lines, at) {
    const [, mark, first] = display.pattern.exec(lines[at]) ?? [];
    const close = mark ? first.indexOf(CLOSED_BY[mark]) : 0;
    return Boolean(mark) && (close < 0 || !first.slice(close + 2).trim());
  },
  read(lines, at) {
    const [, mark, first] = display.pattern.exec(lines[at]);
    const body = [];
    let rest = "";
    let next = at;
    for (let line = first; next < lines.length && (next === at || line.trim()); line = lines[next] ?? "") {
      next += 1;
      const end = line.indexOf(CLOSED_BY[mark]);
      body.push(end < 0 ? line : line.slice(0, end));
      rest = end < 0 ? "" : line.slice(end + 2);
      if (end >= 0) break;
    }
    return [element("p", [shown(body.join(" ")), ...inline(rest)]), next];
  },
};

const shown = (text) => element("span", formula(text), { formula: "shown" });

const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*)|)$/;

const list = {
  starts: (lines, at, depth) => depth < MAX_DEPTH && ITEM.test(lines[at]),
  read(lines, at, depth) {
    const [, margin, first] = ITEM.exec(lines[at]);
    const ordered = /\d/.test(first);
    const items = [];
    let next = at;
    let inner = null;
    let width = 0;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      const indent = line.length - line.trimStart().length;
      const item = ITEM.exec(line);
      if (item && indent <= margin.length + 1 && /\d/.test(item[2]) === ordered) {
        inner = [item[3] ?? ""];
        width = indent + 1;
        items.push(inner);
      } else if (!line.trim()) {
        // A blank line belongs to the list only if the list goes on behind it.
        const following = lines[next + 1] ?? "";
        const goesOn = following.trim() && (following.length - following.trimStart().length >= width || ITEM.test(following));
        if (!goesOn) break;
        inner.push("");
      } else if (indent >= width) {
        inner.push(line.slice(Math.min(indent, width + first.length)));
      } else {
        break;
      }
    }
    const start = ordered ? Number.parseInt(first, 10) : 1;
    const children = items.map((one) => entry(one, depth));
    return [element(ordered ? "ol" : "ul", children, ordered && start !== 1 ? { start: String(start) } : {}), next];
  },
};

/** An item; one that begins with [ ] or [x] is a task. */
function entry(lines, depth) {
  const task = /^\[([ xX])\] +(?=\S)/.exec(lines[0]);
  if (!task) return element("li", tight(blocks(lines, depth + 1)));
  const inner = [lines[0].slice(task[0].length), ...lines.slice(1)];
  return element("li", tight(blocks(inner, depth + 1)), { task: task[1] === " " ? "open" : "done" });
}

/** The blocks of an item, its first paragraph without the element. */
function tight(found) {
  return found.length && found[0].tag === "p" ? [...found[0].children, ...found.slice(1)] : found;
}

const table = {
  starts: (lines, at) => lines[at].includes("|") && isDivider(lines[at + 1] ?? ""),
  read(lines, at) {
    const head = cells(lines[at]);
    const aligned = cells(lines[at + 1]).map(alignment);
    const row = (tag, texts) =>
      element(
        "tr",
        head.map((_, index) => element(tag, inline(texts[index] ?? ""), aligned[index] ? { align: aligned[index] } : {})),
      );
    const rows = [];
    let next = at + 2;
    for (; next < lines.length && lines[next].includes("|"); next += 1) rows.push(row("td", cells(lines[next])));
    const parts = [element("thead", [row("th", head)])];
    if (rows.length) parts.push(element("tbody", rows));
    return [element("table", parts), next];
  },
};

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return bare.split("|").slice(0, MAX_COLUMNS).map((cell) => cell.trim());
}

function isDivider(line) {
  return line.includes("-") && line.includes("|") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
}

function alignment(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
  return "";
}

const READERS = [fence, heading, rule, quote, list, table, display];

const paragraph = {
  read(lines, at, depth) {
    let next = at + 1;
    while (next < lines.length && lines[next].trim() && !READERS.some((one) => one.starts(lines, next, depth))) next += 1;
    return [element("p", inline(lines.slice(at, next).map((line) => line.trim()).join("\n"))), next];
  },
};

// --- inline

const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/** Text with emphasis, code and links. Marks without a counterpart stay text. */
export function inline(text) {
  const open = [{ mark: null, children: [] }];
  const unclosed = new Set(); // lengths of backtick runs that nothing closes any more
  let plain = "";
  let at = 0;

  const top = () => open[open.length - 1].children;
  const flush = () => {
    if (plain) top().push(plain);
    plain = "";
  };
  const add = (node) => {
    flush();
    top().push(node);
  };
  const dissolve = () => {
    const frame = open.pop();
    top().push(frame.mark, ...frame.children);
  };

  while (at < text.length) {
    const char = text[at];
    const math = char === "$" || char === "\\" ? formulaAt(text, at) : null;
    if (math) {
      add(math.node);
      at = math.end;
    } else if (char === "\\" && /[\\`*_~[\]()#|!<>{}$.+-]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if (char === "\n") {
      add(element("br", []));
      at += 1;
    } else if (char === "`") {
      at = codeSpan(text, at, unclosed, add, (raw) => (plain += raw));
    } else if (char === "[" || (char === "!" && text[at + 1] === "[")) {
      const link = linkAt(text, char === "[" ? at : at + 1);
      if (link) {
        add(link.node);
        at = link.end;
      } else {
        plain += char;
        at += 1;
      }
    } else if (char === "h" && !/\w/.test(text[at - 1] ?? "") && /^https?:\/\//.test(text.slice(at, at + 8))) {
      const end = bareUrlEnd(text, at);
      const url = safeUrl(text.slice(at, end));
      if (url) add(element("a", [text.slice(at, end)], { href: url }));
      else plain += text.slice(at, end);
      at = end;
    } else if ("*_~".includes(char)) {
      const mark = markAt(text, at);
      if (!mark) {
        plain += char;
        at += 1;
        continue;
      }
      const before = text[at - 1] ?? " ";
      const after = text[at + mark.length] ?? " ";
      const within = mark[0] === "_" && /\w/.test(before) && /\w/.test(after); // snake_case
      const found = open.findLastIndex((frame) => frame.mark === mark);
      if (found > 0 && !/\s/.test(before) && !within) {
        flush();
        while (open.length - 1 > found) dissolve();
        const frame = open.pop();
        top().push(frame.children.length ? element(MARKS[mark], frame.children) : mark + mark);
      } else if (open.length <= MAX_MARKS && !/\s/.test(after) && !within) {
        flush();
        open.push({ mark, children: [] });
      } else {
        plain += mark;
      }
      at += mark.length;
    } else {
      plain += char;
      at += 1;
    }
  }
  flush();
  while (open.length > 1) dissolve();
  return joined(open[0].children);
}

function markAt(text, at) {
  const two = text.slice(at, at + 2);
  if (two in MARKS) return two;
  return text[at] in MARKS ? text[at] : null;
}

function codeSpan(text, at, unclosed, add, literal) {
  let end = at;
  while (text[end] === "`") end += 1;
  const run = text.slice(at, end);
  for (let close = end; !unclosed.has(run.length); ) {
    close = text.indexOf(run, close);
    if (close < 0) {
      unclosed.add(run.length);
      break;
    }
    let after = close;
    while (text[after] === "`") after += 1;
    if (after - close === run.length) {
      add(element("code", [text.slice(end, close).replace(/\n/g, " ")]));
      return after;
    }
    close = after;
  }
  literal(run);
  return end;
}

/** The formula that begins at `at`, or null. What is more likely a price stays text. */
function formulaAt(text, at) {
  const mark = [text.slice(at, at + 2), text[at]].find((one) => Object.hasOwn(CLOSED_BY, one));
  if (!mark) return null;
  const begin = at + mark.length;
  const length = text.slice(begin, begin + MAX_LABEL).indexOf(CLOSED_BY[mark]);
  const inner = text.slice(begin, begin + length);
  if (length < 1 || !inner.trim()) return null;
  const end = begin + length + mark.length;
  if (mark === "$") {
    const isTerm = /[\\^_={}<>+]|^[A-Za-z][A-Za-z0-9']?$|\w[-*/]\w/.test(inner);
    if (!isTerm || /^\s|\s$/.test(inner) || /[\d$]/.test(text[end] ?? " ")) return null;
  }
  return { node: mark === "$$" || mark === "\\[" ? shown(inner) : element("span", formula(inner), { formula: "inline" }), end };
}

/** The link that begins with the bracket at `at`, or null. A picture becomes a link to it: nothing is fetched. */
function linkAt(text, at) {
  let end = at + 1;
  while (end < text.length && end - at <= MAX_LABEL && text[end] !== "]" && text[end] !== "[") {
    end += text[end] === "\\" ? 2 : 1;
  }
  if (text[end] !== "]" || text[end + 1] !== "(") return null;
  const label = text.slice(at + 1, end);
  let close = end + 2;
  let nested = 0;
  for (; close < text.length && close - end <= MAX_URL + 400; close += 1) {
    if (text[close] === "\n") return null;
    if (text[close] === "(") nested += 1;
    if (text[close] === ")" && nested-- === 0) break;
  }
  if (text[close] !== ")") return null;
  const target = text.slice(end + 2, close).trim().split(/\s/, 1)[0].replace(/^<|>$/g, "");
  const url = safeUrl(target);
  const children = label ? plainMarks(label) : [target];
  if (!url) return { node: element("span", [...children, ` (${target})`]), end: close + 1 };
  return { node: element("a", children, { href: url }), end: close + 1 };
}

/** A label: code spans in it count, links do not. */
function plainMarks(label) {
  const parts = label.split("`");
  if (parts.length % 2 === 0) return [label];
  return parts.map((part, index) => (index % 2 ? element("code", [part]) : part)).filter((part) => part !== "");
}

function bareUrlEnd(text, at) {
  let end = at;
  while (end < text.length && end - at < MAX_URL && !/[\s<>"`]/.test(text[end])) end += 1;
  while (/[.,;:!?'*_~\])]/.test(text[end - 1])) {
    if (text[end - 1] === ")" && text.slice(at, end - 1).includes("(")) break;
    end -= 1;
  }
  return end;
}

function joined(children) {
  const found = [];
  for (const child of children) {
    if (typeof child === "string" && typeof found[found.length - 1] === "string") found[found.length - 1] += child;
    else found.push(child);
  }
  return found;
}
