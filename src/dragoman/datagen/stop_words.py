"""English function words, which never say what a text is about."""

from __future__ import annotations

_WORDS = """
a about above across after afterwards again against ago all almost alone along already also although
always am among amongst an and another any anyone anything anywhere are aren't around as at away back be
became because become becomes becoming been before beforehand behind being below beneath beside besides
best better between beyond both but by came can can't cannot come comes could couldn't currently did
didn't do does doesn't doing don't done down due during each earlier early either else elsewhere enough
especially etc even ever every everyone everything everywhere example except far few fewer first five
following follows for former formerly four from further gave generally get gets getting give given gives
go goes going gone got had hadn't has hasn't have haven't having he he'd he'll he's hence her here
hereby herself him himself his how however i i'd i'll i'm i've if in including indeed inside instead
into is isn't it it'd it'll it's its itself just keep kept knew know known last late later latter least
less let let's like likely little long made mainly make makes making many may maybe me meanwhile might
more moreover most mostly much must mustn't my myself namely near nearly neither never nevertheless new
next nine no nobody none nonetheless nor not nothing now nowhere number of off often oh old on once one
ones only onto or other others otherwise ought our ours ourselves out outside over own part particular
particularly per perhaps possible possibly put quite rather really recently regarding respectively said
same saw say saying says second see seem seemed seeming seems seen several shall shan't she she'd she'll
she's should shouldn't since six so some somehow someone something sometime sometimes somewhat somewhere
soon still such take taken takes taking tell ten than that that's the their theirs them themselves then
there there's thereafter thereby therefore therein these they they'd they'll they're they've thing
things third this those though three through throughout thus til till time times to together told too
took toward towards two under unless unlike until up upon upper us use used uses using usually various
versus very via want wants was wasn't way ways we we'd we'll we're we've well went were weren't what
what's whatever when whenever where whereas whereby wherein wherever whether which while whilst who
who's whoever whole whom whose why will with within without won't would wouldn't year years yes yet you
you'd you'll you're you've your yours yourself yourselves
"""

STOP_WORDS = frozenset(_WORDS.split())
