"""Which question a text asks: without the layout of a task, in units that two texts of one question share."""
