"""Methods from papers that nobody serves yet.  Each is exact, or refused unless lossy output is allowed, and passes the
contract suite; any of it may change in any version.  The core imports nothing from here."""
