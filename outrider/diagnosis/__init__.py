"""Why a drafter accepts less than it could: experiments that change one part of a set-up and measure the same texts."""
