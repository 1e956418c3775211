"""The primer of those that have none of their own: passages on unlike subjects."""

from tokenizers import Tokenizer

# Tokens of a primer. 1,500 were worse on Qwen2.5-Coder-0.5B, better on SmolLM2 (docs/journal/encoding.md).
TOKENS = 512
PASSAGES = (
    """The lighthouse of Ostrand
The lighthouse stands on a reef four miles from the coast. It was built between 1861 and 1865 of granite \
blocks, each of which was cut to fit its neighbours before it was shipped. Three keepers lived there for two \
months at a time. A clockwork turned the lamp until 1934, when a cable brought electricity from the mainland. \
Since 1989 nobody has lived in the tower, and a boat visits twice a year to clean the lenses.""",
    """How bread rises
Yeast feeds on sugar and gives off carbon dioxide. In dough, gluten holds the gas in small bubbles, so that \
the dough grows. Warm dough rises within an hour, cold dough takes a night and tastes better. Salt slows the \
yeast down. In the oven, the gas expands once more before the crust becomes firm, and at about 60 degrees the \
yeast dies.""",
    """Helena Marsh
Helena Marsh (12 March 1902 - 4 June 1981) was a British engineer. She studied in Leeds, and worked on bridges \
in Egypt and India before she returned to England in 1937. Her best known work is the footbridge at Carrow, \
for which she received the medal of the Institution in 1954. Her brother Edward was a painter. She never \
retired.""",
    """Returning an order
You can return an order within 30 days of its delivery. Print the label, put the goods into their original \
box, and bring the parcel to any post office. We refund the price within five working days after the parcel \
has arrived. Opened software, food and earrings are excluded. If something arrived broken, write to us first.""",
    """The river otter
Otters live along rivers, lakes and quiet coasts. An adult weighs from 6 to 11 kilograms and eats about a \
kilogram of fish a day. Its fur has two layers, and the inner one keeps the skin dry. Otters hunt at night, \
and spend the day in a den among roots. Young otters stay with their mother for a year. Where rivers became \
cleaner, otters have come back.""",
    """Second season
The second season began on 9 October 2011 and has thirteen episodes. It was filmed in Montreal because the \
studio in Vancouver was in use. Nadia Petrov joined the cast as Captain Reyes, and Tom Hale left after the \
fourth episode. The final episode was seen by 3.4 million people, fewer than that of the first season.""",
)


def passages(tokenizer: Tokenizer, chunk: str) -> tuple[int, ...]:
    """Token ids of `PASSAGES`, up to `TOKENS`. chunk: a prompt template's text around each, which holds `{text}`."""
    text = "".join(chunk.replace("{text}", passage) for passage in PASSAGES)
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids[:TOKENS])
