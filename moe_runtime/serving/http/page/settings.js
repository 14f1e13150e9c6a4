// Settings of the drawer: kept in this browser, judged where they are typed.

const $ = id => document.getElementById(id);
const KEPT = "moe-runtime settings";
const NUMBERS = ["temperature", "top_p", "max_tokens"];
const FIELDS = ["system", ...NUMBERS, "tools"];

export class Settings {
  constructor(onKey) {
    let kept = {};
    try {
      kept = JSON.parse(localStorage.getItem(KEPT)) || {};
      $("key").value = sessionStorage.getItem(KEPT) || "";
    } catch { /* a browser that keeps nothing, or kept something else */ }
    for (const name of FIELDS) {
      if (typeof kept[name] === "string") $(name).value = kept[name];
      $(name).addEventListener("change", () => this.#keep());
    }
    $("key").addEventListener("change", () => {
      this.#keep();
      onKey();
    });
    $("settings").querySelector("form").noValidate = true;  // this says what is wrong itself
  }

  get key() {
    return $("key").value;
  }

  #keep() {
    this.#judge();
    const values = Object.fromEntries(FIELDS.map(name => [name, $(name).value]));
    try {
      localStorage.setItem(KEPT, JSON.stringify(values));
      sessionStorage.setItem(KEPT, this.key);
    } catch { /* they last as long as the page */ }
  }

  #judge() {  // marks what is wrong; gives the fields
    const found = [...FIELDS, "key"].filter(name => {
      const problem = problemOf(name);
      mark(name, problem);
      return problem;
    });
    return found;
  }

  read() {  // fields of a request, and `system`; null where one is wrong, which is shown
    const [wrong] = this.#judge();
    if (wrong) {
      open(wrong);
      return null;
    }
    const found = {system: $("system").value.trim()};
    for (const name of NUMBERS) if ($(name).value) found[name] = $(name).valueAsNumber;
    if ($("tools").value.trim()) found.tools = JSON.parse($("tools").value);
    return found;
  }

  blame(place, message) {  // what the server says of a field, if it is one of these
    const [name] = place.split(".");
    if (![...FIELDS, "key"].includes(name)) return;
    mark(name, message);
    open(name);
  }
}

function open(name) {
  if (!$("settings").open) $("settings").showModal();
  $(name).focus();
}

function problemOf(name) {
  const field = $(name);
  if (NUMBERS.includes(name) && !field.validity.valid) {
    const {badInput, rangeUnderflow, rangeOverflow} = field.validity;
    if (badInput) return "Expected a number.";
    if (rangeUnderflow) return `Expected ${field.min} or more.`;
    return rangeOverflow ? `Expected ${field.max} or less.` : "Expected a whole number.";
  }
  if (name !== "tools" || !field.value.trim()) return "";
  try {
    return Array.isArray(JSON.parse(field.value)) ? "" : "Expected a list: [ … ].";
  } catch (error) {
    return `Expected JSON: ${error.message}`;
  }
}

function mark(name, problem) {
  const id = `${name}-wrong`;
  $(id)?.remove();
  $(name).setAttribute("aria-invalid", String(Boolean(problem)));
  if (!problem) return $(name).removeAttribute("aria-describedby");
  const words = Object.assign(document.createElement("p"), {id, className: "wrong", textContent: problem});
  $(name).setAttribute("aria-describedby", id);
  $(name).after(words);
}
