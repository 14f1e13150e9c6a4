// What the theme leaves without a name, or out of the keyboard's reach: the dialog of the search,
// the bars beside code, and what is wider than the page. Nothing here is fetched.
function nameAndReach() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  document.querySelectorAll(".md-code__nav").forEach((bar, index) => {
    bar.setAttribute("aria-label", `Code ${index + 1}`);
  });
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset p:has(> img)")) {
    if (box.scrollWidth > box.clientWidth) {
      const names = Array.from(box.querySelectorAll("th"), (cell) => cell.textContent.trim());
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", names.length ? `Table: ${names.join(", ")}` : "Picture");
      box.tabIndex = 0;
    } else {
      box.removeAttribute("tabindex");
    }
  }
}

// A line does not end within the hyphens of an option, as in `--policy`.
function keepOptionsWhole() {
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
    if (code.childElementCount === 0) {
      const option = /(?<![\w-])--?\w[\w-]*/g;
      code.innerHTML = code.innerHTML.replace(option, '<span class="option-name">$&</span>');
    }
  }
}

addEventListener("load", () => {
  keepOptionsWhole();
  nameAndReach();
});
addEventListener("resize", nameAndReach);
