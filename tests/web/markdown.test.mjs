import assert from "node:assert/strict";
import { test } from "node:test";

import { formula } from "../../node/web/static/formula.js";
import { highlighted } from "../../node/web/static/highlight.js";
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

const TAGS = new Set("p h3 h4 h5 h6 hr blockquote ul ol li table thead tbody tr th td pre code strong em del a br span sub sup".split(" "));
const ATTRS = new Set(["href", "language", "start", "align", "formula", "task"]);

test("whatever the text, the same few elements come of it, and every letter stays", () => {
  const pieces = ["*", "**", "_", "`", "``", "```\n", "~~", "[", "](", ")", "!", "#", "# ", "> ", "- ", "1. ", "|", "|---|\n", "\n", "\n\n", "<b>", "&amp;", "\\", "a", "é", "𝒳", "https://e.org/", "javascript:", " ", "    ", "\t", "$", "$$", "\\(", "\\)", "\\frac", "{", "}", "^", "- [x] ", "\u0000", "\u202e"];
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
  const units = ["*a ", "**", "`", "``a`", "[", "[a](", "![", "> ", "- ", "  - ", "_a_", "~~", "|", "#", "https://", "\\", "((", "1. a\n", "```\n", "*a **b ", "$x^", "\\(", "$$\n", "$$ a\n", "\\[ a\n", "$^{"];
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

test("tasks are done or open", () => {
  assert.deepEqual(parse("- [x] a\n- [ ] b\n- [y] c"), [
    el("ul", [el("li", ["a"], { task: "done" }), el("li", ["b"], { task: "open" }), el("li", ["[y] c"])]),
  ]);
});

const inLine = (children) => children.map((one) => (typeof one === "string" ? one : `${one.tag}(${inLine(one.children)})`)).join("");

test("formulas are text that one can read", () => {
  const read = {
    "E = mc^2": "E = mcsup(2)",
    "\\frac{-b \\pm \\sqrt{b^2-4ac}}{2a}": "(−b ± √(bsup(2)−4ac))/(2a)",
    "\\sum_{i=1}^{n} x_i \\le \\infty": "∑sub(i=1)sup(n) xsub(i) ≤ ∞",
    "\\left( \\frac12 \\right)": "( 1/2 )",
    "\\sin x \\text{ if } x \\in \\mathbb{R}": "sin x  if  x ∈ ℝ",
    "\\unknown{a}": "unknowna",
  };
  for (const [text, wanted] of Object.entries(read)) assert.equal(inLine(formula(text)), wanted);
  assert.ok(inLine(formula("{".repeat(5000))).length < 3000);
});

test("what stands between dollars is a formula, unless it is money", () => {
  const formulas = (text) => [...elements(parse(text))].filter(({ attrs }) => attrs.formula).map(({ attrs }) => attrs.formula);
  assert.deepEqual(formulas("so $x$, $a_1$ and \\(b\\):\n\n$$\nc\n$$\n\\[ d \\] and $$e$$ too"), ["inline", "inline", "inline", "shown", "shown", "shown"]);
  for (const text of ["from $5 to $10", "$5-$10", "a $b", "US$ 3 and ca$h", "`$x$`", "\\$x$", "$HOME and $PATH"]) assert.deepEqual(formulas(text), [], text);
});

test("code has colours, and stays the same text", () => {
  const kinds = (code, language) => highlighted(code, language).filter(([kind]) => kind).map(([kind, text]) => `${kind} ${text}`);
  assert.deepEqual(kinds('def f(x):  # "no"\n  return "a\\"b" * 12', "python"), ["keyword def", 'comment # "no"', "keyword return", 'string "a\\"b"', "number 12"]);
  assert.deepEqual(kinds("/* let */ let a = `b`; // c", "js"), ["comment /* let */", "keyword let", "string `b`", "comment // c"]);
  assert.deepEqual(kinds("SELECT a -- all\nFROM b", "sql"), ["keyword SELECT", "comment -- all", "keyword FROM"]);
  assert.deepEqual(kinds("return 1", ""), []);
  for (const code of ['"""a', "'", "`x", "/*", "\\", "a\nb"]) assert.equal(highlighted(code, "py").map(([, text]) => text).join(""), code);
});
