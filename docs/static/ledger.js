// The cards of the ledger: searched, filtered and sorted; the choice stays in the address, to be linked.
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("ledger-form");
  if (!form) return;
  const ledger = document.getElementById("ledger");
  const menus = [...form.querySelectorAll("select")].filter(({ name }) => name !== "order");
  const orders = Object.fromEntries(menus.map(({ name, options }) => [name, [...options].map(({ value }) => value)]));
  const cards = [...ledger.children];
  const said = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));

  function phrases() { // words, and what stands between quotation marks
    return [...form.words.value.toLowerCase().matchAll(/"([^"]+)"|[^\s"]+/g)].map(([word, phrase]) => phrase ?? word);
  }
  function fits(card, asked, except) {
    return asked.every((words) => said.get(card).includes(words)) &&
      menus.every(({ name, value }) => name === except || !value || card.dataset[name] === value);
  }
  function count(values) {
    const counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
    return counts;
  }
  function sort() {
    const by = form.order.value;
    const place = (card) => by === "claim" ? card.id : orders[by].indexOf(card.dataset[by]);
    const order = (a, b) => place(a) < place(b) ? -1 : place(a) > place(b) ? 1 : cards.indexOf(a) - cards.indexOf(b);
    ledger.append(...[...cards].sort(order));
  }
  function draw() {
    const asked = phrases();
    for (const card of cards) card.hidden = !fits(card, asked) && `#${card.id}` !== location.hash;
    const shown = cards.filter((card) => fits(card, asked));
    const verdicts = count(shown.map((card) => card.dataset.verdict));
    const words = orders.verdict.filter((verdict) => verdicts.has(verdict));
    form.querySelector("output").textContent = [
      `${shown.length} of ${cards.length} claims`, ...words.map((verdict) => `${verdict} ${verdicts.get(verdict)}`),
    ].join(" · ");
    for (const { name, options } of menus) { // how many each choice would leave
      const left = count(cards.filter((card) => fits(card, asked, name)).map((card) => card.dataset[name]));
      for (const option of [...options].slice(1)) option.textContent = `${option.value} (${left.get(option.value) ?? 0})`;
    }
  }
  function keep() {
    const chosen = [...new FormData(form)].filter(([name, value]) => value && (name !== "order" || value !== "paper"));
    const query = new URLSearchParams(chosen);
    history.replaceState(null, "", (query.size ? `?${query}` : location.pathname) + location.hash);
  }

  for (const [name, value] of new URLSearchParams(location.search)) if (form.elements[name]) form.elements[name].value = value;
  for (const menu of form.querySelectorAll("select")) if (menu.selectedIndex < 0) menu.selectedIndex = 0; // no such choice
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target === form.order) sort();
    draw();
    keep();
  });
  form.addEventListener("reset", () => setTimeout(() => { // once the fields are empty
    sort();
    draw();
    keep();
  }));
  window.addEventListener("hashchange", draw);
  ledger.addEventListener("click", ({ target }) => {
    if (!target.matches("button.link")) return;
    const link = target.closest("article").querySelector("a.id");
    copy(target, location.href.split(/[?#]/)[0] + link.hash, link);
  });
  sort();
  draw();
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
});
