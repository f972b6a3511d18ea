// Code that can be copied with one press, and the cells that set a notebook up folded away.
document.addEventListener("DOMContentLoaded", () => {
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
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      const text = block.querySelector("pre").textContent.trimEnd();
      try {
        await navigator.clipboard.writeText(text);
      } catch { // a page from a disk may not write to the clipboard: select the code, to be copied by hand
        getSelection().selectAllChildren(block.querySelector("pre"));
        button.textContent = "selected";
        return;
      }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    block.append(button);
  }
});
