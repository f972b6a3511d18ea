// Shows the ledger's rows that match the menus, and keeps the choice in the address so that it can be linked.
document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("ledger-filters");
  if (!form) return;
  const rows = [...document.querySelectorAll("#ledger tbody tr")];
  const menus = [...form.querySelectorAll("select")];
  const asked = new URLSearchParams(location.search);
  for (const menu of menus) if (asked.has(menu.name)) menu.value = asked.get(menu.name);

  const filter = () => {
    for (const row of rows) row.hidden = menus.some(({ name, value }) => value && row.dataset[name] !== value);
    document.getElementById("ledger-count").value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
    const chosen = new URLSearchParams(menus.filter(({ value }) => value).map(({ name, value }) => [name, value]));
    history.replaceState(null, "", (chosen.size ? `?${chosen}` : location.pathname) + location.hash);
  };
  form.addEventListener("change", filter);
  filter();
});
