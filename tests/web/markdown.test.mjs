import assert from "node:assert/strict";
import { test } from "node:test";

import { inline, parse, safeUrl } from "../../node/web/static/markdown.js";

const p = (...children) => ({ tag: "p", attrs: {}, children });
const el = (tag, children, attrs = {}) => ({ tag, attrs, children });

/** All elements of a tree. */
function* elements(nodes) {
  for (const node of nodes) {
    if (typeof node === "string") continue;
    yield node;
    yield* elements(node.children);
  }
}

const textOf = (nodes) => nodes.map((node) => (typeof node === "string" ? node : textOf(node.children))).join("");

test("emphasis, code and strikethrough", () => {
  assert.deepEqual(inline("a **b _c_** `d*` ~~e~~"), [
    "a ",
    el("strong", ["b ", el("em", ["c"])]),
    " ",
    el("code", ["d*"]),
    " ",
    el("del", ["e"]),
  ]);
});

test("marks without a counterpart stay text", () => {
  for (const text of ["2 * 3 * 4", "a ** b", "snake_case_name", "**open", "`open", "*a **b", "[a](b", "![", "~"]) {
    assert.equal(textOf(inline(text)), text);
  }
});

test("nested marks are closed in order", () => {
  assert.deepEqual(inline("*a **b* c**"), [el("em", ["a ", "**", "b"]), " c**"]);
});

test("headings begin below those of the page", () => {
  assert.deepEqual(parse("# One\n###### Six ##"), [el("h3", ["One"]), el("h6", ["Six"])]);
});

test("a fence keeps what is in it, and one that is not closed goes to the end", () => {
  assert.deepEqual(parse("```python\nprint('<b>')\n\n# no heading\n```\nafter"), [
    el("pre", [el("code", ["print('<b>')\n\n# no heading"])], { language: "python" }),
    p("after"),
  ]);
  assert.deepEqual(parse("~~~\n```\n* a"), [el("pre", [el("code", ["```\n* a"])], { language: "" })]);
});

test("lists, nested and numbered", () => {
  assert.deepEqual(parse("- a\n  - b\n- c\n\n3. x\n4. y"), [
    el("ul", [el("li", ["a", el("ul", [el("li", ["b"])])]), el("li", ["c"])]),
    el("ol", [el("li", ["x"]), el("li", ["y"])], { start: "3" }),
  ]);
});

test("a list item holds code", () => {
  const [list] = parse("1. first\n\n   ```\n   x = 1\n   ```\n2. second");
  assert.equal(list.children.length, 2);
  assert.deepEqual(list.children[0].children[1], el("pre", [el("code", ["x = 1"])], { language: "" }));
});

test("tables have the columns of their head", () => {
  const [table] = parse("| a | b |\n|---|--:|\n| 1 | 2 | 3 |\n| 4 |");
  const rows = table.children[1].children;
  assert.deepEqual(rows.map((row) => row.children.map((cell) => textOf(cell.children))), [["1", "2"], ["4", ""]]);
  assert.equal(rows[0].children[1].attrs.align, "right");
});

test("quotes, rules and line breaks", () => {
  assert.deepEqual(parse("> a\n> b\n\n---\nc\nd"), [
    el("blockquote", [p("a", el("br", []), "b")]),
    el("hr", []),
    p("c", el("br", []), "d"),
  ]);
});

test("links of the web only", () => {
  assert.deepEqual(inline("[a](https://example.org/x)"), [el("a", ["a"], { href: "https://example.org/x" })]);
  assert.deepEqual(inline("see https://example.org/a_(b)."), [
    "see ",
    el("a", ["https://example.org/a_(b)"], { href: "https://example.org/a_(b)" }),
    ".",
  ]);
  assert.equal(safeUrl("mailto:a@example.org"), "mailto:a@example.org");
});

const HOSTILE = [
  "javascript:alert(1)",
  "JaVaScRiPt:alert(1)",
  "java\tscript:alert(1)",
  "\u0001javascript:alert(1)",
  " javascript:alert(1)",
  "data:text/html,<script>alert(1)</script>",
  "vbscript:x",
  "file:///etc/passwd",
  "blob:https://example.org/1",
  "//example.org",
  "/v1/models",
  "https://bank.example@evil.example/",
  "https://",
  `https://example.org/${"a".repeat(3000)}`,
];

test("no other address becomes a link", () => {
  for (const url of HOSTILE) {
    assert.equal(safeUrl(url), null, url);
    for (const text of [`[a](${url})`, `[a](<${url}>)`, `![a](${url})`, `<${url}>`]) {
      for (const { tag, attrs } of elements(parse(text))) {
        if (tag === "a") assert.match(attrs.href, /^(https?|mailto):/);
        assert.ok(!/^(java|vb)script|^data|^file|^blob/i.test(attrs.href ?? ""));
      }
    }
  }
});

test("HTML is text", () => {
  const text = `<script>alert(1)</script> <img src=x onerror="alert(1)"> <a href="javascript:alert(1)">x</a>`;
  assert.deepEqual(parse(text), [p(text)]);
});

test("a picture is a link, which nobody follows by reading", () => {
  assert.deepEqual(inline("![secret](https://evil.example/?q=1)"), [
    el("a", ["secret"], { href: "https://evil.example/?q=1" }),
  ]);
});

const TAGS = new Set("p h3 h4 h5 h6 hr blockquote ul ol li table thead tbody tr th td pre code strong em del a br span".split(" "));
const ATTRS = new Set(["href", "language", "start", "align"]);

test("whatever the text, the same few elements come of it, and every letter stays", () => {
  const pieces = ["*", "**", "_", "`", "``", "```\n", "~~", "[", "](", ")", "!", "#", "# ", "> ", "- ", "1. ", "|", "|---|\n", "\n", "\n\n", "<b>", "&amp;", "\\", "a", "é", "𝒳", "https://e.org/", "javascript:", " ", "    ", "\t", "\u0000", "\u202e"];
  let seed = 7;
  const random = (below) => ((seed = (seed * 1103515245 + 12345) % 2147483648) >> 8) % below;
  for (let round = 0; round < 3000; round += 1) {
    const text = Array.from({ length: 1 + random(40) }, () => pieces[random(pieces.length)]).join("");
    const tree = parse(text);
    for (const { tag, attrs } of elements(tree)) {
      assert.ok(TAGS.has(tag), `${tag} of ${JSON.stringify(text)}`);
      assert.ok(Object.keys(attrs).every((name) => ATTRS.has(name)));
    }
    assert.ok(!text.includes("é") || textOf(tree).includes("é") || /\|---\||https/.test(text), JSON.stringify(text));
  }
});

test("hostile texts take time in proportion to their length", () => {
  const units = ["*a ", "**", "`", "``a`", "[", "[a](", "![", "> ", "- ", "  - ", "_a_", "~~", "|", "#", "https://", "\\", "((", "1. a\n", "```\n", "*a **b "];
  const steps = (text) => {
    // Microseconds of processor time.
    const begun = process.cpuUsage();
    parse(text);
    return process.cpuUsage(begun).user;
  };
  for (const unit of units) {
    const long = unit.repeat(Math.ceil(80000 / unit.length));
    steps(long.slice(0, 10000)); // compiled from here on
    const short = Math.max(steps(long.slice(0, 10000)), 5000);
    // Eight times the length: a quadratic reader would take 64 times as long.
    assert.ok(steps(long) < 24 * short + 200000, unit);
  }
});

test("nesting is bounded", () => {
  parse("> ".repeat(5000) + "a");
  parse(Array.from({ length: 500 }, (_, depth) => `${"  ".repeat(depth)}- a`).join("\n"));
  inline("**a _b ".repeat(5000));
});
