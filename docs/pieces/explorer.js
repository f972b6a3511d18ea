// The explorer of one group of answers: gcpo's formulas for a group, and a page to change the group by hand.
// docs/pieces puts this file, its page and its answers into one piece of HTML.
(() => {
  const RANGE = [0, 2]; // of a reward
  const FLOOR = 1e-6; // shorter centres have no direction
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const clip = (value) => Math.min(1, Math.max(0, value));
  const norm = (vector) => Math.sqrt(sum(vector.map((x) => x * x)));
  const scaled = (vector, by) => vector.map((x) => x * by);
  const total = (vectors) => vectors[0].map((_, axis) => sum(vectors.map((vector) => vector[axis])));

  // 1 - cosine of two unit vectors, exactly 0 for equal ones.
  const distance = (one, two) => clip(sum(one.map((x, axis) => (x - two[axis]) ** 2)) / 2);

  function cosineDispersion(unit) { // GCPO, Eq. 7
    return sum(unit.flatMap((one) => unit.map((two) => distance(one, two)))) / unit.length ** 2;
  }

  function barycentricTransport(unit, clusters) { // GCPO, Eq. 9 and 10
    if (unit.length < 2) return 0;
    const parts = [...new Set(clusters)].map((label) => unit.filter((_, i) => clusters[i] === label));
    const centres = parts.map((part) => {
      const mean = scaled(total(part), 1 / part.length);
      return scaled(mean, part.length / unit.length / Math.max(norm(mean), FLOOR)); // times the cluster's share
    });
    return Math.max(0, (1 - norm(total(centres))) / 2);
  }

  function semanticEntropy(clusters) { // GCPO, section 2.1
    const shares = [...new Set(clusters)].map((label) => clusters.filter((k) => k === label).length / clusters.length);
    return Math.max(0, -sum(shares.map((share) => share * Math.log(share))));
  }

  function rewardDispersion(rewards, [low, high] = RANGE) { // GCPO, Eq. 11
    const G = rewards.length, mean = sum(rewards) / G;
    if (G < 2) return 0;
    const largest = (2 / G) * Math.floor(G / 2) * Math.ceil(G / 2) * (high - low);
    return clip(sum(rewards.map((r) => Math.abs(r - mean))) / largest);
  }

  function rewardVariance(rewards, [low, high] = RANGE) { // GCPO, App. G, of Q-Hawkeye
    const mean = sum(rewards) / rewards.length;
    return clip(sum(rewards.map((r) => (r - mean) ** 2)) / rewards.length / ((high - low) / 2) ** 2);
  }

  function baseAdvantages(rewards) { // GCPO, Eq. 1
    const mean = sum(rewards) / rewards.length;
    const squares = sum(rewards.map((r) => (r - mean) ** 2));
    const deviation = Math.sqrt(squares / Math.max(1, rewards.length - 1)) + 1e-4;
    return rewards.map((r) => (new Set(rewards).size > 1 ? (r - mean) / deviation : 0));
  }

  function measure(vectors, clusters, rewards, alpha = 0.6) {
    const unit = vectors.map((vector) => scaled(vector, 1 / norm(vector)));
    const strength = unit.length > 1 ? alpha / Math.log(unit.length) : 0;
    const cd = cosineDispersion(unit), bot = barycentricTransport(unit, clusters);
    const se = semanticEntropy(clusters), rd = rewardDispersion(rewards);
    const damp = (score) => clip(1 - strength * score);
    const boosted = 1 + strength * rd;
    const weights = {
      grpo: 1,
      se: damp(se),
      cd_only: damp(cd ** 2),
      bot_only: damp(bot ** 2),
      rd_only: boosted,
      gcpo_cd: damp(cd ** 2) * boosted,
      gcpo_bot: damp(bot ** 2) * boosted,
      qhawkeye: clip(1 - 0.2 * rewardVariance(rewards)),
    };
    const base = baseAdvantages(rewards);
    const advantages = Object.fromEntries(
      Object.entries(weights).map(([name, weight]) => [name, base.map((a) => a * weight)])
    );
    const distances = unit.map((one) => unit.map((two) => distance(one, two)));
    return { clusters: new Set(clusters).size, se, cd, bot, rd, weights, advantages, distances };
  }

  const NAMES = {
    grpo: "GRPO", se: "SE", cd_only: "CD alone", bot_only: "BoT alone", rd_only: "RD alone",
    gcpo_cd: "GCPO-CD", gcpo_bot: "GCPO-BoT", qhawkeye: "Q-Hawkeye",
  };
  const MEASURES = {
    clusters: "clusters", se: "semantic entropy SE, nats", cd: "cosine dispersion CD", bot: "barycentric transport BoT",
    rd: "reward dispersion RD",
  };
  // A group: answers as [text, right, cluster].
  const HOMES = [
    ["a house by the sea", true, 1], ["a house by the sea", true, 1], ["a house by the sea", true, 1],
    ["a house on the coast", true, 1], ["a house near the forest", false, 2], ["a house close to the woods", false, 2],
    ["a dog that is black", false, 3], ["a house near the forest", false, 2],
  ];
  const EXAMPLES = {
    "a right answer, a near miss, and a stray": HOMES,
    "chapter 00's four: where is the key?": [
      ["in the garden", true, 1], ["the garden", true, 1], ["in the cellar", false, 2], ["a letter", false, 3],
    ],
    "one meaning, two rewards": HOMES.map(([text, right]) => [text, right, 1]),
    "near misses: 42 among its neighbours": ["42", "42", "forty-two", "42", "43", "41", "48", "24"].map((text, i) => [
      text, i < 4, [1, 1, 1, 1, 2, 3, 4, 5][i],
    ]),
    "far apart: a place, a letter, a city": ["in the garden", "the garden", "a letter", "Paris"].map((text, i) => [
      text, i < 2, [1, 1, 2, 3][i],
    ]),
    "all right (equal rewards)": Array(8).fill(["Paris", true, 1]),
    "all wrong, all different": ["Lyon", "London", "Rome", "Berlin"].map((text, i) => [text, false, i + 1]),
    "one answer": [["Paris", true, 1]],
    "64 answers": Array.from({ length: 64 }, (_, i) => HOMES[i % 8]),
    "no answer at all": [],
  };
  const LARGEST = 64;

  const svg = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };

  // A bar from the middle line, and its end's number beside it.
  function bar(cell, value, most, digits, number) {
    const drawn = svg("svg", { class: "explorer-bars", viewBox: "-50 0 100 10", preserveAspectRatio: "none", "aria-hidden": true });
    const length = most ? (48 * value) / most : 0;
    drawn.append(
      svg("rect", { x: Math.min(0, length), y: 1.5, width: Math.abs(length), height: 7, fill: value < 0 ? "#e6550d" : "#3182bd" }),
      svg("line", { x1: 0, x2: 0, y1: 0, y2: 10, stroke: "currentColor", "stroke-width": 0.6 })
    );
    cell.replaceChildren(drawn);
    number.textContent = digits;
  }

  const same = (text) => text.trim().toLowerCase(); // MiniLM reads no capitals
  const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

  function start(root, { texts, rows }) {
    const find = (selector) => root.querySelector(selector);
    const body = find(".explorer-answers tbody"), said = find(".explorer-said"), list = find("datalist");
    list.id = `explorer-texts-${Math.random().toString(36).slice(2)}`;
    const known = texts.map(same);
    find(".explorer-count").textContent = texts.length;
    list.append(...texts.map((text) => new Option(text, text)));
    find("[name=example]").append(...Object.keys(EXAMPLES).map((name) => new Option(name, name)));
    find("[name=method]").append(...Object.entries(NAMES).slice(1).map(([key, name]) => new Option(name, key)));
    find("[name=method]").value = "gcpo_bot";

    const group = () => [...body.rows].map((row) => {
      const [text, right, cluster] = row.querySelectorAll("input");
      return { row, text: text.value.trim(), right: right.checked, cluster: cluster.valueAsNumber };
    });

    // Vectors of the answers; a text of which none is stored is at right angles to every other.
    function vectors(answers) {
      const strange = [...new Set(answers.map(({ text }) => same(text)))].filter((text) => !known.includes(text));
      const width = rows.length + strange.length;
      return [strange, answers.map(({ text }) => {
        const vector = Array(width).fill(0), at = known.indexOf(same(text));
        if (at < 0) vector[rows.length + strange.indexOf(same(text))] = 1;
        else rows[at].forEach((value, axis) => { vector[axis] = value; });
        return vector;
      })];
    }

    function sentence(answers, alpha, strange) {
      if (!answers.length) return "A group needs at least one answer: add one.";
      if (!(alpha >= 0 && alpha < Infinity)) return "α has to be a number of at least 0.";
      if (answers.some(({ cluster }) => !Number.isInteger(cluster))) return "Every answer needs a cluster, a whole number.";
      const equal = new Set(answers.map(({ right }) => right)).size === 1;
      return [
        ...strange.map((text) => `No embedding is stored for “${text}”.`),
        answers.length === 1 ? "One answer has nothing to differ from: every weight is 1, every advantage 0."
          : equal ? "All rewards are equal, so every advantage is 0, and no weight can change that." : "",
      ].join(" ").trim();
    }

    function show() {
      const answers = group(), alpha = find("[name=alpha]").valueAsNumber, method = find("[name=method]").value;
      const [strange, embedded] = vectors(answers);
      said.textContent = sentence(answers, alpha, strange);
      find("[name=add]").disabled = answers.length >= LARGEST;
      const broken = !answers.length || !(alpha >= 0 && alpha < Infinity) || answers.some(({ cluster }) => !Number.isInteger(cluster));
      find(".explorer-figures").hidden = broken;
      if (broken) {
        for (const cell of body.querySelectorAll(".plain, .bar, .value")) cell.replaceChildren();
        return;
      }
      const found = measure(embedded, answers.map((a) => a.cluster), answers.map((a) => (a.right ? 2 : 0)), alpha);
      const most = Math.max(...found.advantages.grpo.map(Math.abs), ...found.advantages[method].map(Math.abs));
      answers.forEach(({ row }, i) => {
        row.querySelector(".plain").textContent = signed(found.advantages.grpo[i]);
        const value = found.advantages[method][i];
        bar(row.querySelector(".bar"), value, most, signed(value), row.querySelector(".value"));
      });
      find(".explorer-measures tbody").replaceChildren(...Object.entries(MEASURES).map(([key, name]) => {
        const line = document.createElement("tr");
        line.innerHTML = `<th scope="row">${name}</th><td class="number">${key === "clusters" ? found[key] : found[key].toFixed(3)}</td>`;
        return line;
      }));
      const changes = Object.values(found.weights).map((weight) => Math.abs(weight - 1));
      find(".explorer-weights tbody").replaceChildren(...Object.entries(found.weights).map(([key, weight]) => {
        const line = document.createElement("tr");
        line.innerHTML = `<th scope="row">${NAMES[key]}</th><td class="bar"></td><td class="number"></td>`;
        bar(line.cells[1], weight - 1, Math.max(...changes), weight.toFixed(4), line.cells[2]);
        return line;
      }));
      draw(find(".explorer-distances"), answers, found.distances);
    }

    function draw(picture, answers, distances) {
      const G = answers.length, edge = G / 14, step = Math.ceil(G / 16); // a group of many has few numbers
      picture.setAttribute("viewBox", `${-edge} ${-edge} ${G + edge} ${G + edge}`);
      const mean = sum(distances.flat()) / G ** 2;
      picture.setAttribute("aria-label", `Distances of ${G} answers by pairs, ${mean.toFixed(2)} on average`);
      picture.replaceChildren(...answers.flatMap((one, y) => answers.map((two, x) => {
        const cell = svg("rect", { x, y, width: 1.02, height: 1.02, fill: `hsl(0 0% ${100 - 100 * distances[y][x]}%)` });
        const title = svg("title", {});
        title.textContent = `${one.text} / ${two.text}: ${distances[y][x].toFixed(2)}`;
        cell.append(title);
        return cell;
      })));
      const frame = { width: 0.9, height: 0.9, fill: "none", stroke: "#e6550d", "stroke-width": G / 150, "pointer-events": "none" };
      answers.forEach((one, y) => answers.forEach((two, x) => {
        if (one.cluster === two.cluster) picture.append(svg("rect", { x: x + 0.05, y: y + 0.05, ...frame }));
      }));
      const look = { "font-size": edge * 0.75, fill: "currentColor", "text-anchor": "middle", "dominant-baseline": "central" };
      for (let k = 0; k < G; k += step) {
        for (const [x, y] of [[k + 0.5, -edge / 2], [-edge / 2, k + 0.5]]) {
          const number = svg("text", { x, y, ...look });
          number.textContent = k + 1;
          picture.append(number);
        }
      }
      picture.append(svg("rect", { x: 0, y: 0, width: G, height: G, fill: "none", stroke: "#888", "stroke-width": G / 150 }));
    }

    function add([text, right, cluster]) {
      const row = body.insertRow();
      row.innerHTML =
        `<th scope="row"></th><td><input aria-label="answer" list="${list.id}"></td>` +
        '<td data-name="right"><input type="checkbox" aria-label="right"></td>' +
        '<td data-name="cluster"><input type="number" min="1" step="1" aria-label="cluster"></td>' +
        '<td class="plain number" data-name="GRPO"></td><td class="weighed" data-name="→"><div><span class="bar"></span><span class="value number"></span></div></td>' +
        '<td><button type="button" aria-label="remove this answer">×</button></td>';
      const inputs = row.querySelectorAll("input");
      [inputs[0].value, inputs[1].checked, inputs[2].value] = [text, right, cluster];
      row.querySelector("button").addEventListener("click", () => {
        const next = row.nextElementSibling ?? row.previousElementSibling;
        row.remove();
        (next?.querySelector("button") ?? find("[name=add]")).focus();
        show();
      });
      return row;
    }

    function load(name) {
      body.replaceChildren();
      EXAMPLES[name].forEach(add);
      show();
    }

    find("[name=add]").addEventListener("click", () => {
      const labels = group().map(({ cluster }) => cluster || 0);
      add([texts[group().length % texts.length], false, Math.max(0, ...labels) + 1]).querySelector("input").focus();
      show();
    });
    find("[name=equal]").addEventListener("click", () => {
      const seen = [...new Set(group().map(({ text }) => same(text)))];
      for (const { row, text } of group()) row.querySelector("[aria-label=cluster]").value = seen.indexOf(same(text)) + 1;
      show();
    });
    find("[name=example]").addEventListener("change", (event) => load(event.target.value));
    root.addEventListener("input", (event) => event.target.name === "example" || show());
    load(Object.keys(EXAMPLES)[0]);
  }

  window.gcpoExplorer = { measure, start };
})();
