// Search results: guides come first, then Troubleshooting, then everything else by Sphinx's own scores.
var Scorer = {
  score: ([docname, , , , score]) =>
    score + (docname.startsWith("guides/") || docname === "recipes" ? 8 : docname === "troubleshooting" ? 4 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
