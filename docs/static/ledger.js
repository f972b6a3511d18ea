// The ledger as a table to search and to sort; menus choose rows, and the choice stays in the address, to be linked.
document.addEventListener("DOMContentLoaded", async () => {
  const form = document.getElementById("ledger-filters");
  if (!form) return;
  const library = Object.keys(window).find((name) => name.startsWith("_itables_")); // put there by itables' own script
  const { default: DataTable } = await window[library];
  const table = new DataTable("#ledger", {
    paging: false,
    order: [],
    layout: { topStart: "info", topEnd: "search", bottomStart: null },
    language: { info: "_TOTAL_ of _MAX_ claims", infoEmpty: "0 of _MAX_ claims", infoFiltered: "" },
  });
  const menus = [...form.querySelectorAll("select")];
  const asked = new URLSearchParams(location.search);
  for (const menu of menus) menu.value = asked.get(menu.name) ?? "";
  table.search.fixed("menus", (text, cells, index) =>
    menus.every(({ name, value }) => !value || table.row(index).node().dataset[name] === value)
  );
  form.addEventListener("change", () => {
    table.draw();
    const chosen = new URLSearchParams(menus.filter(({ value }) => value).map(({ name, value }) => [name, value]));
    history.replaceState(null, "", (chosen.size ? `?${chosen}` : location.pathname) + location.hash);
  });
  table.draw();
});
