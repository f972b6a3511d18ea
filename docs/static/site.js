// Code that can be copied with one press, the cells that set a notebook up folded away, and snippets of search results.
async function copy(button, text, shown) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page from a disk may not write to the clipboard: select what is shown, to be copied by hand
    getSelection().selectAllChildren(shown);
    button.textContent = "selected";
    return;
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = before; }, 1500);
}

// The sentence of a page that has most of the words searched for; one of its prose, if that has any. Sphinx hands over
// stems, "entropi" for "entropy", which no text has: without their last vowel they are found.
function summarise(html, stems, anchor) {
  const page = new DOMParser().parseFromString(html, "text/html");
  const article = page.querySelector("article") ?? page.body;
  const found = (anchor && article.querySelector(anchor)) || article;
  for (const { firstChild: tex } of found.querySelectorAll(".math")) // as plain as TeX can be read
    tex.nodeValue = tex.nodeValue.replace(/\\(?:(?:mathrm|text|operatorname|left|right)\b|[()[\],;!])|[\\{}]/g, "");
  const words = [...stems].map((stem) => stem.toLowerCase().replace(/[ie]$/, ""));
  const has = (text) => words.filter((word) => text.toLowerCase().includes(word)).length;
  const best = (kind) => [...found.querySelectorAll(kind)]
    .flatMap((part) => part.textContent.replace(/\s+/g, " ").trim().split(/(?<=[.!?]) (?=[A-Z])/))
    .reduce((first, text) => has(text) > has(first) ? text : first, "");
  const text = best("p, li, dd") || best("h1, h2, h3, td, dt") || best("pre");
  const at = Math.max(0, Math.min(...words.map((word) => text.toLowerCase().indexOf(word)).filter((n) => n >= 0)) - 120);
  const summary = document.createElement("p");
  summary.className = "context";
  summary.textContent = text.length > 300 ? `…${text.slice(at, at + 300)}…` : text;
  return summary;
}

document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search !== "undefined") Search.makeSearchSummary = summarise; // on the page of results
  for (const cell of document.querySelectorAll("div.cell")) {
    const input = cell.querySelector(".cell_input");
    const setsUp = cell.classList.contains("tag_parameters") || /^(import|from) /m.test(input?.textContent ?? "");
    const shows = cell.querySelector(".cell_output");
    if (!input || !setsUp || shows) continue;
    const fold = document.createElement("details");
    fold.className = "set-up";
    const title = document.createElement("summary");
    title.textContent = cell.classList.contains("tag_parameters") ? "Parameters" : "Set-up: imports and settings";
    input.before(fold);
    fold.append(title, input);
  }
  for (const block of document.querySelectorAll("div.highlight")) {
    if (block.closest(".cell_output")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    const code = block.querySelector("pre");
    button.addEventListener("click", () => copy(button, code.textContent.trimEnd(), code));
    block.append(button);
  }
});
