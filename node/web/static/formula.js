// TeX as text that one can read: {tag, attrs, children} with sub and sup, or text. No DOM. One pass, bounded depth.

const MAX_DEPTH = 8;
const MAX_TEXT = 2000;
const SIGNS = pairs(
  "alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ " +
    "sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω " +
    "times × cdot · div ÷ pm ± mp ∓ ast ∗ circ ∘ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ propto ∝ ll ≪ gg ≫ " +
    "sum ∑ prod ∏ int ∫ iint ∬ oint ∮ partial ∂ nabla ∇ infty ∞ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ cup ∪ cap ∩ " +
    "emptyset ∅ forall ∀ exists ∃ neg ¬ land ∧ wedge ∧ lor ∨ vee ∨ to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ implies ⇒ iff ⇔ " +
    "leftrightarrow ↔ mapsto ↦ ldots … dots … cdots ⋯ vdots ⋮ angle ∠ perp ⊥ parallel ∥ oplus ⊕ otimes ⊗ langle ⟨ rangle ⟩ " +
    "lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ mid | vert | prime ′ degree ° hbar ℏ ell ℓ Re ℜ Im ℑ aleph ℵ therefore ∴ because ∵",
);
const SETS = pairs("R ℝ N ℕ Z ℤ Q ℚ C ℂ P ℙ E 𝔼");
const MARKS = { hat: "\u0302", bar: "\u0304", overline: "\u0304", vec: "\u20d7", dot: "\u0307", ddot: "\u0308", tilde: "\u0303" };
const SPACES = { ",": " ", ";": " ", ":": " ", " ": " ", "!": "", "\\": "\n", quad: "  ", qquad: "    " };
const PLAIN = new Set("text mathrm mathbf mathit mathsf mathcal operatorname boldsymbol textbf textit mbox boxed".split(" "));
const DROPPED = new Set("left right big Big bigg Bigg displaystyle textstyle limits nolimits".split(" "));

function pairs(text) {
  const words = text.split(" ");
  return new Map(words.flatMap((word, at) => (at % 2 ? [] : [[word, words[at + 1]]])));
}

/** What a formula says, as children of an element. */
export function formula(text) {
  return merged(sequence({ text: text.trim().slice(0, MAX_TEXT), at: 0 }, 0, ""));
}

function sequence(reader, depth, until) {
  const found = [];
  while (reader.at < reader.text.length) {
    if (until && reader.text[reader.at] === until) {
      reader.at += 1;
      break;
    }
    found.push(...part(reader, depth));
  }
  return found;
}

function part(reader, depth) {
  const char = reader.text[reader.at++];
  if (depth > MAX_DEPTH) return [char];
  if (char === "{") return sequence(reader, depth + 1, "}");
  if (char === "}") return [];
  if (char === "^" || char === "_") return [{ tag: char === "^" ? "sup" : "sub", attrs: {}, children: merged(argument(reader, depth)) }];
  if (char === "'") return ["′"];
  if (char === "-") return ["−"];
  if (char === "&") return [" "];
  if (char !== "\\") return [char];
  const name = /^(?:[A-Za-z]{1,30}|[^A-Za-z])?/.exec(reader.text.slice(reader.at, reader.at + 32))[0];
  reader.at += name.length;
  return command(name, reader, depth);
}

function command(name, reader, depth) {
  if (SIGNS.has(name)) return [SIGNS.get(name)];
  if (Object.hasOwn(SPACES, name)) return [SPACES[name]];
  if (DROPPED.has(name)) {
    if (reader.text[reader.at] === ".") reader.at += 1;
    return [];
  }
  if (name === "begin" || name === "end") return argument(reader, depth) && [];
  if (PLAIN.has(name)) return argument(reader, depth);
  if (name === "mathbb") return argument(reader, depth).map((one) => SETS.get(one) ?? one);
  if (Object.hasOwn(MARKS, name)) return [...argument(reader, depth), MARKS[name]];
  if (/^[dt]?frac$/.test(name)) return [...grouped(argument(reader, depth)), "/", ...grouped(argument(reader, depth))];
  if (name === "binom") return ["(", ...argument(reader, depth), " over ", ...argument(reader, depth), ")"];
  if (name === "sqrt") return root(reader, depth);
  // Functions such as \sin, and what is not known: its name.
  const joins = /^[A-Za-z]{2}/.test(name) && /^\s*[\w\\]/.test(reader.text.slice(reader.at, reader.at + 8));
  return [joins ? `${name}${reader.text[reader.at] === " " ? "" : " "}` : name];
}

function root(reader, depth) {
  let index = [];
  if (reader.text[reader.at] === "[") {
    reader.at += 1;
    index = [{ tag: "sup", attrs: {}, children: merged(sequence(reader, depth + 1, "]")) }];
  }
  return [...index, "√", ...grouped(argument(reader, depth))];
}

/** What follows: a group, a command or one sign. */
function argument(reader, depth) {
  while (reader.text[reader.at] === " ") reader.at += 1;
  return reader.at < reader.text.length ? part(reader, depth + 1) : [];
}

/** In brackets, unless it is a number, a sign or a name, with an index or an exponent or without. */
function grouped(children) {
  const text = merged(children).map((one) => (typeof one === "string" ? one : "")).join("");
  return /^([\d.]+|\p{L}*|\S)$/u.test(text) ? children : ["(", ...children, ")"];
}

function merged(children) {
  const found = [];
  for (const child of children) {
    if (typeof child === "string" && typeof found.at(-1) === "string") found.push(found.pop() + child);
    else found.push(child);
  }
  return found;
}
