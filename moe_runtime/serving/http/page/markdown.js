// Markdown of answers: CommonMark without raw HTML, pictures and reference links, with GitHub's
// tables, struck text and task lists. A line break in a paragraph stays one.
//
// `parse` gives a tree of strings and nodes {tag, children, ...}; `build` makes elements of it by
// name and text alone, so nothing that a model writes is ever read as HTML.

const DEEPEST = 40;  // nested blocks or emphasis; what is deeper stays as it is written
const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const DELIMITERS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\n$/, "").split("\n").map(spaced), 0);
}

function spaced(line) {  // tabs at the beginning reach the next multiple of four
  let found = "";
  for (const char of line) {
    if (char === "\t") found += " ".repeat(4 - found.length % 4);
    else if (char === " ") found += char;
    else break;
  }
  return found + line.slice(line.search(/[^ \t]|$/));
}

const indent = line => line.search(/[^ ]|$/);
const isBlank = line => !line.trim();

function blocks(lines, depth) {
  const found = [];
  found.isLoose = false;  // whether empty lines separate two of these blocks
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (isBlank(line)) {
      at += 1;
      continue;
    }
    found.isLoose ||= found.length > 0 && isBlank(lines[at - 1]);
    if (depth > DEEPEST) {
      found.push({tag: "p", children: [lines.slice(at).join("\n")]});
      at = lines.length;
    } else if (indent(line) >= 4) {
      let end = at;
      while (end < lines.length && (isBlank(lines[end]) || indent(lines[end]) >= 4)) end += 1;
      while (isBlank(lines[end - 1])) end -= 1;
      const code = lines.slice(at, end).map(one => one.slice(4)).join("\n");
      found.push({tag: "pre", language: "", text: code + "\n"});
      at = end;
    } else if ((match = line.match(FENCE))) {
      const [, before, fence, info] = match;
      const isEnd = one => indent(one) < 4 && one.trim().length >= fence.length
        && one.trim() === fence[0].repeat(one.trim().length);
      let end = at + 1;
      while (end < lines.length && !isEnd(lines[end])) end += 1;
      const code = lines.slice(at + 1, end)
        .map(one => one.slice(Math.min(indent(one), before.length)) + "\n").join("");
      found.push({tag: "pre", language: unescaped(info.trim()).split(/\s/)[0], text: code});
      at = end + 1;
    } else if ((match = line.match(HEADING))) {
      found.push({tag: "h" + match[1].length, children: inline((match[2] || "").trim())});
      at += 1;
    } else if (RULE.test(line)) {
      found.push({tag: "hr", children: []});
      at += 1;
    } else if (QUOTE.test(line)) {
      const inner = [];
      while (at < lines.length && (QUOTE.test(lines[at]) || goesOn(inner, lines[at]))) {
        inner.push(spaced(lines[at].replace(/^ {0,3}> ?/, "")));
        at += 1;
      }
      found.push({tag: "blockquote", children: blocks(inner, depth + 1)});
    } else if (ITEM.test(line)) {
      const [list, end] = listAt(lines, at, depth);
      found.push(list);
      at = end;
    } else if (isTable(lines, at)) {
      const [table, end] = tableAt(lines, at);
      found.push(table);
      at = end;
    } else {
      let end = at + 1;
      while (end < lines.length && !UNDERLINE.test(lines[end]) && continues(lines[end])
        && !isTable(lines, end)) end += 1;
      const text = lines.slice(at, end).map((one, index) => index ? one.trimStart() : one.trim())
        .join("\n").trimEnd();
      const under = end < lines.length && lines[end].match(UNDERLINE);
      const tag = under ? (under[1][0] === "=" ? "h1" : "h2") : "p";
      found.push({tag, children: inline(text)});
      at = end + (under ? 1 : 0);
    }
  }
  return found;
}

function continues(line) {  // whether a line of text may belong to the paragraph before it
  if (isBlank(line)) return false;
  if (indent(line) >= 4) return true;
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return false;
  const item = line.match(ITEM);
  return !item || isBlank(item[4]) || !/^(?:[-*+]|1[.)])$/.test(item[2]);
}

function goesOn(inner, line) {  // a paragraph within a quote or an item, without its mark
  if (!inner.length || !continues(line)) return false;
  return !(indent(line) < 4 && (UNDERLINE.test(line) || ITEM.test(line))) && endsInText(inner);
}

function endsInText(lines) {
  const bare = line => {
    for (let last = null; last !== line;) {
      last = line;
      line = line.replace(/^ {0,3}(?:>|[-*+](?= )|\d{1,9}[.)](?= )) ?/, "");
    }
    return line;
  };
  const last = bare(lines[lines.length - 1]);
  if (isBlank(last) || indent(last) >= 4 || HEADING.test(last) || RULE.test(last)) return false;
  const near = lines.slice(-100);  // so that a long quote takes no time that grows with its square
  return near.filter(line => FENCE.test(bare(line))).length % 2 === 0;
}

function listAt(lines, begin, depth) {
  const [, , first] = lines[begin].match(ITEM);
  const kind = first[first.length - 1], isOrdered = kind === "." || kind === ")";
  const items = [];
  let at = begin, isLoose = false, hasGap = false;
  while (at < lines.length) {
    const match = RULE.test(lines[at]) ? null : lines[at].match(ITEM);
    if (!match || match[2][match[2].length - 1] !== kind) break;
    if (hasGap) isLoose = true;
    const [, before, mark, gap, rest] = match;
    const width = before.length + mark.length + (isBlank(rest) || gap.length > 4 ? 1 : gap.length);
    const inner = [isBlank(rest) ? "" : " ".repeat(Math.max(gap.length - 4, 0) && gap.length - 1) + rest];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      if (isBlank(line)) {
        if (inner.length === 1 && !inner[0]) break;  // an empty item has no second line
        inner.push("");
      } else if (indent(line) >= width) {
        inner.push(line.slice(width));
      } else if (goesOn(inner, line)) {
        inner.push(line);
      } else {
        break;
      }
      at += 1;
    }
    hasGap = false;
    while (inner.length > 1 && !inner[inner.length - 1]) {
      inner.pop();
      hasGap = true;
    }
    let next = at;
    while (next < lines.length && isBlank(lines[next])) next += 1;
    hasGap ||= next > at;
    if (next < lines.length && indent(lines[next]) < width && ITEM.test(lines[next])) at = next;
    const children = blocks(inner, depth + 1);
    isLoose ||= children.isLoose;
    items.push({tag: "li", children});
  }
  for (const item of items) {
    const [head] = item.children;
    const task = head && head.tag === "p" && typeof head.children[0] === "string"
      && head.children[0].match(/^\[([ xX])\][ \n]/);
    if (task) {
      item.checked = task[1] !== " ";
      head.children[0] = head.children[0].slice(4);
    }
    if (!isLoose) {
      item.children = item.children.flatMap(one => one.tag === "p" ? one.children : [one]);
    }
  }
  const list = {tag: isOrdered ? "ol" : "ul", children: items};
  if (isOrdered && parseInt(first, 10) !== 1) list.start = parseInt(first, 10);
  return [list, at];
}

function cells(line) {
  const found = [""];
  const text = line.trim().replace(/^\|/, "");
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      found[found.length - 1] += "|";
      at += 1;
    } else if (text[at] === "|") {
      found.push("");
    } else {
      found[found.length - 1] += text[at];
    }
  }
  if (found.length > 1 && isBlank(found[found.length - 1])) found.pop();
  return found.map(one => one.trim());
}

function isTable(lines, at) {
  const [head, under] = [lines[at], lines[at + 1]];
  if (under === undefined || !head.includes("|") || !DELIMITERS.test(under)) return false;
  if (!/[|:]/.test(under)) return false;
  return indent(head) < 4 && cells(head).length === cells(under).length;
}

function tableAt(lines, at) {
  const align = cells(lines[at + 1]).map(one =>
    one.endsWith(":") ? (one.startsWith(":") ? "center" : "right") : one.startsWith(":") ? "left" : "");
  const row = (line, tag) => ({tag: "tr", children: align.map((side, column) =>
    ({tag, align: side, children: inline(cells(line)[column] || "")}))});
  const head = {tag: "thead", children: [row(lines[at], "th")]};
  const rows = [];
  for (at += 2; at < lines.length && !isBlank(lines[at]) && continues(lines[at]); at += 1) {
    if (indent(lines[at]) >= 4 || ITEM.test(lines[at])) break;
    rows.push(row(lines[at], "td"));
  }
  const body = rows.length ? [{tag: "tbody", children: rows}] : [];
  return [{tag: "table", children: [head, ...body]}, at];
}

const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©",
  hellip: "…", mdash: "—", ndash: "–", times: "×", rarr: "→", larr: "←"};
const ESCAPED = /\\([!-/:-@[-`{-~])|&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]+));/g;

function unescaped(text) {
  return text.replace(ESCAPED, (whole, char, decimal, hex, name) => {
    if (char) return char;
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? parseInt(decimal, 10) : parseInt(hex, 16);
    const isBad = !code || code > 0x10ffff || (code >= 0xd800 && code < 0xe000);
    return isBad ? "\ufffd" : String.fromCodePoint(code);
  });
}

const SPACE = /^[\s\u00a0]?$/u, PUNCTUATION = /^[\p{P}\p{S}]$/u;
const ONE_ESCAPED = new RegExp(ESCAPED.source, "y");
const ADDRESS = /<(https?:\/\/[^\s<>]*)>/iy;
const BARE = /https?:\/\/[^\s<>]*[^\s<>.,:;!?'"*_~`)\]]/iy;
const TARGET = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\((?:[^\s()\\]|\\.)*\))*))(?:\s+(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\((?:[^()\\]|\\.)*\)))?\s*\)/y;

function at(pattern, text, index) {
  pattern.lastIndex = index;
  return pattern.exec(text);
}

function inline(text) {
  const nodes = [];  // strings, elements, marks {mark, count, opens, closes} and brackets
  const brackets = [];
  const unclosed = new Set();  // lengths of backticks that close no code any more
  let plain = "", index = 0;
  const add = (...more) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(...more);
  };
  while (index < text.length) {
    const char = text[index];
    let match;
    if (char === "`") {
      const run = at(/`+/y, text, index)[0];
      const end = unclosed.has(run.length) ? -1 : closing(text, index + run.length, run.length);
      if (end < 0) {
        unclosed.add(run.length);
        plain += run;
        index += run.length;
        continue;
      }
      let code = text.slice(index + run.length, end).replace(/\n/g, " ");
      if (/^ .* $/.test(code) && !isBlank(code)) code = code.slice(1, -1);
      add({tag: "code", children: [code]});
      index = end + run.length;
    } else if ((char === "\\" || char === "&") && (match = at(ONE_ESCAPED, text, index))) {
      plain += unescaped(match[0]);
      index += match[0].length;
    } else if (char === "\n" || char === "\\" && text[index + 1] === "\n") {
      plain = plain.replace(/ +$/, "");
      add({tag: "br", children: []});
      index += char === "\n" ? 1 : 2;
      while (text[index] === " ") index += 1;
    } else if (char === "<" && (match = at(ADDRESS, text, index))) {
      add({tag: "a", href: match[1], children: [match[1]]});
      index += match[0].length;
    } else if (char === "h" && !/\w/.test(text[index - 1] || "") && (match = at(BARE, text, index))) {
      add({tag: "a", href: match[0], isBare: true, children: [match[0]]});
      index += match[0].length;
    } else if (char === "[" || char === "!" && text[index + 1] === "[") {
      const mark = char === "[" ? "[" : "![";
      add({bracket: mark, text: mark});
      brackets.push({place: nodes.length - 1, isPicture: mark === "![", isActive: true});
      index += mark.length;
    } else if (char === "]") {
      const opener = brackets.pop();
      const target = opener && opener.isActive ? at(TARGET, text, index + 1) : null;
      const href = target ? unescaped(target[1] ?? target[2]) : "";
      if (!/^https?:\/\//i.test(href)) {
        plain += "]";
        index += 1;
        continue;
      }
      add();
      const children = emphasised(nodes.splice(opener.place + 1));
      // a picture of elsewhere is not loaded, but linked to
      const isEmpty = opener.isPicture && !children.length;
      nodes[opener.place] = {tag: "a", href, children: isEmpty ? [href] : unlinked(children)};
      if (!opener.isPicture) for (const one of brackets) one.isActive &&= one.isPicture;
      index += 1 + target[0].length;
    } else if (char === "*" || char === "_" || char === "~") {
      const run = at(/\*+|_+|~+/y, text, index)[0];
      const before = [...text.slice(Math.max(index - 2, 0), index)].pop() || "";
      const after = String.fromCodePoint(text.codePointAt(index + run.length) || 32);
      const isLeft = !SPACE.test(after)
        && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
      const isRight = !SPACE.test(before)
        && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
      const isWord = char === "_";
      if (char === "~" && run.length !== 2) {
        plain += run;
      } else {
        add({mark: char, count: run.length, size: run.length,
          opens: isLeft && (!isWord || !isRight || PUNCTUATION.test(before)),
          closes: isRight && (!isWord || !isLeft || PUNCTUATION.test(after))});
      }
      index += run.length;
    } else {
      plain += char;
      index += 1;
    }
  }
  add();
  return emphasised(nodes);
}

function closing(text, from, length) {
  const runs = /`+/g;
  runs.lastIndex = from;
  for (let match; (match = runs.exec(text));) if (match[0].length === length) return match.index;
  return -1;
}

function unlinked(children) {  // a link within a link is its text
  return children.flatMap(one => typeof one === "string" ? [one]
    : one.tag === "a" ? one.children
    : [{...one, children: unlinked(one.children)}]);
}

const depthOf = node => typeof node === "string" ? 0 : node.depth || 0;

function emphasised(nodes) {  // CommonMark's way: each closing mark looks back for its opening one
  const done = [];
  const bottoms = new Map();
  for (const node of nodes) {
    done.push(node);
    if (!node.mark || !node.closes) continue;
    while (node.count) {
      const key = [node.mark, node.opens, node.size % 3].join();
      const bottom = bottoms.get(key) || 0;
      let open = done.length - 2;
      while (open >= bottom && !matches(done[open], node)) open -= 1;
      if (open < bottom) {
        bottoms.set(key, done.length - 1);
        break;
      }
      const opener = done[open];
      const used = node.mark === "~" || Math.min(opener.count, node.count) >= 2 ? 2 : 1;
      const children = done.splice(open + 1, done.length - open - 2);
      const depth = 1 + Math.max(0, ...children.map(depthOf));
      if (depth > DEEPEST) {
        done.splice(open + 1, 0, ...children);
        break;
      }
      const tag = node.mark === "~" ? "del" : used === 2 ? "strong" : "em";
      done.splice(open + 1, 0, {tag, depth, children: plainOf(children)});
      opener.count -= used;
      node.count -= used;
      if (!opener.count) done.splice(open, 1);
      for (const [name, place] of bottoms) bottoms.set(name, Math.min(place, done.length - 1));
    }
    if (!node.count) done.pop();
  }
  return plainOf(done);
}

function matches(opener, closer) {
  if (opener.mark !== closer.mark || !opener.opens) return false;
  const isOdd = (opener.closes || closer.opens) && (opener.size + closer.size) % 3 === 0;
  return !isOdd || (opener.size % 3 === 0 && closer.size % 3 === 0) || opener.mark === "~";
}

function plainOf(nodes) {  // marks and brackets that mean nothing are text
  const found = [];
  for (const node of nodes) {
    const one = node.mark ? node.mark.repeat(node.count) : node.bracket ? node.text : node;
    const last = found.length - 1;
    if (typeof one !== "string") found.push(one);
    else if (typeof found[last] === "string") found[last] += one;
    else if (one) found.push(one);
  }
  return found;
}

export function build(nodes, codeBlock) {
  const box = document.createDocumentFragment();
  for (const node of nodes) {
    if (typeof node === "string") {
      box.append(node);
      continue;
    }
    if (node.tag === "pre") {
      box.append(codeBlock(node.language, node.text));
      continue;
    }
    const made = document.createElement(node.tag);
    if (node.tag === "a") {
      made.href = node.href;
      made.rel = "noopener noreferrer";
      made.target = "_blank";
    }
    if (node.start !== undefined) made.start = node.start;
    if (node.align) made.style.textAlign = node.align;
    if (node.checked !== undefined) {
      const box = document.createElement("input");
      Object.assign(box, {type: "checkbox", checked: node.checked, disabled: true});
      box.setAttribute("aria-label", node.checked ? "done" : "to do");
      made.append(box, " ");
    }
    made.append(build(node.children, codeBlock));
    if (node.tag === "table") {  // a wide one is scrolled by itself
      const frame = document.createElement("div");
      Object.assign(frame, {className: "table", tabIndex: 0});
      frame.append(made);
      box.append(frame);
    } else {
      box.append(made);
    }
  }
  return box;
}
