// Code in colours: [kind, text] pairs, whose texts together are the code. No DOM. One expression that goes forward, without
// nested repetition, so a text takes time in proportion to its length.

const MAX_TEXT = 50_000;
const KEYWORDS = new Set(
  (
    "abstract and as assert async await bool boolean break case catch char class const continue debugger def default del delete do done " +
    "double elif else elsif end enum esac except export extends false False fi final finally float fn for from func function global go goto " +
    "if impl implements import in include inline instanceof int interface is lambda let local long loop match mod module mut namespace new " +
    "nil None nonlocal not null or package pass private protected pub public raise return self short signed sizeof static string " +
    "struct super switch template then this throw throws trait true True try type typedef typeof undefined union unless unsafe unsigned " +
    "until use using var virtual void volatile when where while with yield"
  ).split(" "),
);
const SQL = new Set(["sql", "mysql", "postgresql", "sqlite"]);
const SQL_WORDS = new Set(
  (
    "select insert update delete create table into values from where join left right inner outer on and or not null is in as group by order " +
    "limit having distinct drop alter set union all case when then else end with exists between like asc desc primary key"
  ).split(" "),
);
const HASH = new Set("py python python3 rb ruby sh bash zsh shell console r yaml yml toml perl pl make makefile dockerfile elixir julia".split(" "));
const PLAIN = new Set(["", "text", "txt", "plain", "output", "markdown", "md"]);
const STRINGS = [String.raw`("{3}|'{3})[\s\S]*?(?:\k<quotes>|$)`.replace("(", "(?<quotes>"), String.raw`"(?:[^"\\\n]|\\.)*"?`, String.raw`'(?:[^'\\\n]|\\.)*'?`, "`[^`]*`?"];
const REST = String.raw`(?<number>\b\d[\w.]*)|(?<word>[A-Za-z_]\w*)`;

/** The pieces of a code: kind is "keyword", "string", "number", "comment" or "". */
export function highlighted(code, language) {
  const name = language.toLowerCase();
  if (PLAIN.has(name) || code.length > MAX_TEXT) return [["", code]];
  const comments = HASH.has(name) ? "#.*" : SQL.has(name) ? "--.*" : String.raw`//.*|/\*[\s\S]*?(?:\*/|$)|<!--[\s\S]*?(?:-->|$)`;
  const found = [];
  let plain = 0;
  for (const match of code.matchAll(new RegExp(`(?<comment>${comments})|(?<string>${STRINGS.join("|")})|${REST}`, "g"))) {
    const kind = kindOf(match.groups, SQL.has(name));
    if (!kind) continue;
    if (match.index > plain) found.push(["", code.slice(plain, match.index)]);
    found.push([kind, match[0]]);
    plain = match.index + match[0].length;
  }
  if (plain < code.length) found.push(["", code.slice(plain)]);
  return found;
}

function kindOf({ comment, string, number, word }, sql) {
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  return (sql ? SQL_WORDS.has(word.toLowerCase()) : KEYWORDS.has(word)) ? "keyword" : "";
}
