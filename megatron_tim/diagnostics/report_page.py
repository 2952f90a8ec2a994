"""The page that a run's report is poured into: one file, no script, nothing loaded from elsewhere."""

TEMPLATE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light">
<link rel="icon" href="data:,">
<title>{{ name }}: training report</title>
<style>
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid #ddd; font-size: 1.2rem; }
h3 { margin: 0 0 .2rem; font-size: 1rem; }
p { margin: .3rem 0; }
.quiet, figcaption { color: #565656; font-size: .9rem; }
.findings { margin: .6rem 0 0; padding: 0; list-style: none; }
.findings li { margin: .5rem 0; padding: .5rem .8rem; border-left: .3rem solid #7a7a7a; background: #f6f6f6; }
.findings .good { border-color: #00795a; }
.findings .bad { border-color: #b3440e; background: #fdf1ea; }
.findings b { margin-right: .4rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.6rem; }
figure { margin: 0; break-inside: avoid; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #eee; text-align: left; vertical-align: top; font-weight: normal; }
thead th { color: #565656; font-size: .9rem; }
td { overflow-wrap: anywhere; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.whole { white-space: nowrap; }
.narrow { max-width: 36rem; }
.configuration { columns: 22rem; column-gap: 2rem; }
.configuration section { break-inside: avoid; margin-bottom: 1rem; }
.configuration th { width: 50%; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
dt { font-weight: 600; }
dd { margin: 0 0 .5rem; }
h2, h3 { break-after: avoid; }
tr, dt, .findings li { break-inside: avoid; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .charts { grid-template-columns: 1fr 1fr; gap: 1rem; }
  .configuration { columns: 2; }
  .findings li { print-color-adjust: exact; }
}
</style>
</head>
<body>
<header>
<h1>{{ name }}</h1>
<p class="quiet">Report of a reinforcement-learning run{% if model %} of <code>{{ model }}</code>{% endif %}, written {{ written }}.</p>
</header>
<main>
<h2>In short</h2>
<ul class="findings">
{% for finding in findings %}<li class="{{ finding.kind }}"><b>{{ marks[finding.kind] }}</b>{{ finding.text }}</li>
{% endfor %}</ul>

<h2>Before and after</h2>
<table class="narrow">
<thead><tr><th></th><th class="number">before</th><th class="number">after</th></tr></thead>
<tbody>
{% for label, before, after in comparison %}\
<tr><th scope="row">{{ label }}</th><td class="number">{{ before }}</td><td class="number">{{ after }}</td></tr>
{% endfor %}</tbody>
</table>
<p class="quiet">Reward and KL: means over the {{ ends }}. Accuracy: first and last evaluation.</p>

{% if charts %}
<h2>Step by step</h2>
<div class="charts">
{% for chart in charts %}<figure>
<h3>{{ chart.title }}</h3>
{{ chart.svg | safe }}
<figcaption>{{ chart.caption }}</figcaption>
</figure>
{% endfor %}</div>
{% if resumed_after %}
<p class="quiet">Dotted lines: the run was stopped and resumed after step {{ resumed_after | join(", ") }}.</p>
{% endif %}
{% endif %}

{% if phases %}
<h2>Where the time went</h2>
<table class="narrow">
<thead><tr><th>phase</th><th class="number">share of the steps' time</th></tr></thead>
<tbody>
{% for phase, share in phases %}<tr><th scope="row">{{ phase }}</th><td class="number">{{ share }}</td></tr>
{% endfor %}</tbody>
</table>
{% endif %}

<h2>Preflight</h2>
{% if preflight %}
<p>Before step 1 the trainer scored tokens that the server had sampled. The same weights on both sides give nearly the same numbers.</p>
<table class="narrow">
<tbody>
{% for label, value in preflight %}<tr><th scope="row">{{ label }}</th><td class="number">{{ value }}</td></tr>
{% endfor %}</tbody>
</table>
{% else %}
<p>This run made no preflight comparison of server and trainer.</p>
{% endif %}

<h2>Words</h2>
<dl>
<dt>Server, rollout</dt><dd>The inference engine that samples the responses, and its probabilities.</dd>
<dt>Trainer, train</dt><dd>The training engine that computes gradients, and its probabilities for the same tokens.</dd>
<dt>Mismatch</dt><dd>The same weights give a token different probabilities on the two sides, because their arithmetic differs.
Uncorrected, it biases the gradient and can make a run collapse.</dd>
<dt>Ratio</dt><dd>Train probability over rollout probability of a sampled token.</dd>
<dt>Correction</dt><dd>A weight for each token that makes up for the mismatch; capping it bounds the influence of a single token.</dd>
<dt>KL(rollout || train)</dt><dd>Mean of log rollout probability minus log train probability over the sampled tokens.
It is an estimate and can fall below 0.</dd>
</dl>

{% if history %}
<h2>History</h2>
<table>
<thead><tr><th>time (UTC)</th><th>what</th><th>details</th></tr></thead>
<tbody>
{% for time, event, details in history %}<tr><td>{{ time }}</td><td class="whole">{{ event }}</td><td>{{ details }}</td></tr>
{% endfor %}</tbody>
</table>
{% endif %}

{% if configuration %}
<h2>Configuration</h2>
<div class="configuration">
{% for section, entries in configuration %}<section>
<h3>{{ section }}</h3>
<table><tbody>
{% for key, value in entries %}<tr><th scope="row">{{ key }}</th><td><code>{{ value }}</code></td></tr>
{% endfor %}</tbody></table>
</section>
{% endfor %}</div>
{% endif %}
</main>
<footer class="quiet">
<p>All numbers are in <code>{{ files }}</code>; a metric that the run did not log has no chart. Made by megatron-tim {{ version }}.</p>
</footer>
</body>
</html>
"""
