// The n-gram trie of trie.py, node for node: the same windows, counts, order and evictions, behind plain functions.
//
// Nodes are in one array, and children are found in one hash table by (parent, token).  The children of a node form a list,
// the most recent first.  Node 0 is the root.  The reasons in trie.py hold here too.
#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <queue>
#include <utility>
#include <vector>

namespace {

using Id = uint32_t;
constexpr Id ROOT = 0, NONE = UINT32_MAX;
constexpr int BREADTH = 8;

struct Node {
    uint64_t updated;
    uint32_t count;
    int32_t token;
    Id parent, suffix;
    Id newest;        // first child, or NONE
    Id newer, older;  // siblings, or NONE
    uint32_t generation;  // grows when the node is dropped, so that who still points here can tell
    uint16_t length;
    bool is_listed;
};

// Children by parent and token: open addressing, linear probing; erasing moves later entries back.
class Children {
  public:
    explicit Children(const std::vector<Node>& nodes) : nodes(nodes), table(1024) {}

    Id find(Id parent, int32_t token) const {
        const uint32_t hash = hashed(parent, token);
        for (size_t at = hash & mask();; at = (at + 1) & mask()) {
            const Entry& entry = table[at];
            if (entry.node == ROOT) return NONE;
            if (entry.hash == hash && nodes[entry.node].parent == parent && nodes[entry.node].token == token) return entry.node;
        }
    }

    void insert(Id parent, int32_t token, Id node) {
        if (3 * (used + 1) > 2 * table.size()) grow();
        put({hashed(parent, token), node});
        used++;
    }

    void erase(Id parent, int32_t token, Id node) {
        size_t hole = hashed(parent, token) & mask();
        while (table[hole].node != node) hole = (hole + 1) & mask();
        for (size_t at = (hole + 1) & mask(); table[at].node != ROOT; at = (at + 1) & mask()) {
            // an entry may move back to the hole unless its own slot comes after it
            const size_t own = table[at].hash & mask();
            if (((at - own) & mask()) >= ((at - hole) & mask())) {
                table[hole] = table[at];
                hole = at;
            }
        }
        table[hole] = {};
        used--;
    }

    void clear() {
        table.assign(1024, {});
        used = 0;
    }

    size_t bytes() const { return table.capacity() * sizeof(Entry); }

  private:
    struct Entry {
        uint32_t hash = 0;
        Id node = ROOT;  // the root is nobody's child: an empty slot
    };
    const std::vector<Node>& nodes;
    std::vector<Entry> table;
    size_t used = 0;

    size_t mask() const { return table.size() - 1; }

    static uint32_t hashed(Id parent, int32_t token) {
        uint64_t x = (uint64_t(parent) << 32) | uint32_t(token);
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return uint32_t(x ^ (x >> 31));
    }

    void put(Entry entry) {
        size_t at = entry.hash & mask();
        while (table[at].node != ROOT) at = (at + 1) & mask();
        table[at] = entry;
    }

    void grow() {
        std::vector<Entry> old(2 * table.size());
        old.swap(table);
        for (const Entry& entry : old)
            if (entry.node != ROOT) put(entry);
    }
};

struct Trie {
    int depth;
    uint64_t capacity, clock = 0, grown = 0, used = 0, epoch = 0;
    std::vector<Node> nodes;
    Children children;
    std::vector<Id> spare;
    using Listed = std::pair<uint64_t, Id>;
    std::priority_queue<Listed, std::vector<Listed>, std::greater<Listed>> leaves;
    bool lists_leaves = false;

    Trie(int depth, uint64_t capacity) : depth(depth), capacity(capacity), children(nodes) {
        try {
            nodes.reserve(capacity + 1);  // reserves addresses only, so that no later token has to wait for a copy of all nodes
        } catch (const std::exception&) {
        }
        nodes.push_back(made(-1, ROOT, 0));
    }

    static Node made(int32_t token, Id parent, uint16_t length) {
        return {0, 0, token, parent, ROOT, NONE, NONE, NONE, 0, length, false};
    }

    void clear() {
        nodes.assign(1, made(-1, ROOT, 0));
        children.clear();
        spare.clear();
        leaves = {};
        lists_leaves = false;
        clock = grown = used = 0;
        epoch++;
    }

    Id count_up(Id parent, int32_t token) {
        Id child = children.find(parent, token);
        const bool is_new = child == NONE;
        if (is_new) {
            child = add(parent, token);
        } else if (nodes[parent].newest != child) {
            unlink(child);
            link(child);
        }
        nodes[child].count++;
        nodes[child].updated = ++clock;
        if (is_new) list(child);
        return child;
    }

    void make_room() {
        while (used + depth > capacity) {
            if (!lists_leaves) {
                lists_leaves = true;
                std::vector<bool> is_spare(nodes.size());
                for (Id id : spare) is_spare[id] = true;
                for (Id id = 1; id < nodes.size(); id++)
                    if (!is_spare[id] && nodes[id].newest == NONE) list(id);
            }
            drop(oldest());
        }
    }

    Id step(Id node, int32_t token) const {
        for (;;) {
            const Id child = children.find(node, token);
            if (child != NONE) return child;
            if (node == ROOT) return ROOT;
            node = nodes[node].suffix;
        }
    }

    size_t bytes() const {
        return nodes.size() * sizeof(Node) + children.bytes() + spare.capacity() * sizeof(Id) + leaves.size() * sizeof(Listed);
    }

  private:
    Id add(Id parent, int32_t token) {
        const uint16_t length = nodes[parent].length + 1;
        Id id;
        if (spare.empty()) {
            id = Id(nodes.size());
            nodes.push_back(made(token, parent, length));
        } else {
            id = spare.back();
            spare.pop_back();
            const uint32_t generation = nodes[id].generation;
            nodes[id] = made(token, parent, length);
            nodes[id].generation = generation;
        }
        children.insert(parent, token, id);
        link(id);
        used++;
        grown++;
        return id;
    }

    void link(Id child) {
        Node& parent = nodes[nodes[child].parent];
        nodes[child].newer = NONE;
        nodes[child].older = parent.newest;
        if (parent.newest != NONE) nodes[parent.newest].newer = child;
        parent.newest = child;
    }

    void unlink(Id child) {
        const Node& node = nodes[child];
        if (node.newer != NONE) nodes[node.newer].older = node.older;
        else nodes[node.parent].newest = node.older;
        if (node.older != NONE) nodes[node.older].newer = node.newer;
    }

    void list(Id leaf) {
        if (!lists_leaves || nodes[leaf].is_listed) return;
        nodes[leaf].is_listed = true;
        leaves.push({nodes[leaf].updated, leaf});
    }

    Id oldest() {
        for (;;) {
            const auto [listed, leaf] = leaves.top();
            leaves.pop();
            nodes[leaf].is_listed = false;
            if (nodes[leaf].newest != NONE) continue;
            if (nodes[leaf].updated == listed) return leaf;
            list(leaf);
        }
    }

    void drop(Id leaf) {
        const Id parent = nodes[leaf].parent;
        children.erase(parent, nodes[leaf].token, leaf);
        unlink(leaf);
        nodes[leaf].generation++;
        spare.push_back(leaf);
        used--;
        if (parent != ROOT && nodes[parent].newest == NONE) list(parent);
    }
};

constexpr uint64_t MATCH = UINT64_MAX;

// A continuation, or (`updated` is MATCH) a match whose continuations are yet to be offered.
struct Candidate {
    double weight;
    uint64_t updated;
    uint64_t number;
    Id node;
    int32_t at;
    int level;

    bool operator<(const Candidate& other) const {  // the greatest is taken first
        if (weight != other.weight) return weight < other.weight;
        if (updated != other.updated) return updated < other.updated;
        return number > other.number;
    }
};

// A proposal that is being made; the same token under the same parent is one node.
struct Tree {
    int budget, levels;
    int32_t *tokens, *parents;
    double* shares;
    int size;

    bool has_room() const { return size < budget; }

    // The number of this token under node `under`; `size` where it is not there.  A search is fastest: trees are small.
    int find(int32_t token, int32_t under) const {
        int n = under + 1;
        while (n < size && (parents[n] != under || tokens[n] != token)) n++;
        return n;
    }

    int place(int32_t token, int32_t under) {
        const int n = find(token, under);
        if (n == size) {
            tokens[size] = token;
            parents[size++] = under;
        }
        return n;
    }
};

struct Cursor {
    Trie& trie;
    std::vector<int32_t> recent;
    Id at = ROOT;
    uint32_t generation = 0;
    uint64_t grown, epoch;

    explicit Cursor(Trie& trie) : trie(trie) { place(ROOT); }

    void append(int32_t token) {
        trie.make_room();
        Id node = found();
        if (trie.nodes[node].length == trie.depth) node = trie.nodes[node].suffix;
        const Id longest = trie.count_up(node, token);
        for (Id child = longest; node != ROOT;) {
            node = trie.nodes[node].suffix;
            const Id shorter = trie.count_up(node, token);
            trie.nodes[child].suffix = shorter;
            child = shorter;
        }
        remember(token);
        place(longest);
    }

    void follow(int32_t token) {
        const Id node = trie.step(found(), token);
        remember(token);
        place(node);
    }

    // The longest match, looked for again where it is gone or may have become longer.
    Id found() {
        const bool is_lost = epoch != trie.epoch || trie.nodes[at].generation != generation;
        if (is_lost || (grown != trie.grown && trie.nodes[at].length < recent.size())) {
            Id node = ROOT;
            for (int32_t token : recent) node = trie.step(node, token);
            place(node);
        }
        return at;
    }

    Id followed(Id node, int shortest) const {
        for (; trie.nodes[node].length >= shortest; node = trie.nodes[node].suffix)
            if (trie.nodes[node].newest != NONE) return node;
        return NONE;
    }

    int chain(int most, int shortest, int32_t* tokens) {
        int size = 0;
        for (Id node = followed(found(), shortest); node != NONE && size < most; node = followed(node, shortest)) {
            node = trie.nodes[node].newest;
            tokens[size++] = trie.nodes[node].token;
        }
        return size;
    }

    void by_frequency(Tree& tree, int shortest) {
        candidates.clear();
        uint64_t number = 0;
        const auto push = [&](Id node, double weight, uint64_t updated, int32_t under, int level) {
            if (node == NONE) return;
            candidates.push_back({weight, updated, number++, node, under, level});
            std::push_heap(candidates.begin(), candidates.end());
        };
        push(followed(found(), shortest), 1.0, MATCH, -1, 0);
        while (!candidates.empty() && tree.has_room()) {
            std::pop_heap(candidates.begin(), candidates.end());
            const Candidate best = candidates.back();
            candidates.pop_back();
            const Node& node = trie.nodes[best.node];
            if (best.updated == MATCH) {
                const double total = double(node.count) + 1;
                double left = total;
                int looked = 0;
                for (Id child = node.newest; child != NONE && looked < BREADTH; child = trie.nodes[child].older, looked++) {
                    left -= trie.nodes[child].count;
                    push(child, best.weight * (trie.nodes[child].count / total), trie.nodes[child].updated, best.at, best.level);
                }
                push(followed(node.suffix, shortest), best.weight * (left / total), MATCH, best.at, best.level);
            } else if (tree.find(node.token, best.at) == tree.size) {
                const int n = tree.place(node.token, best.at);
                tree.shares[n] = best.weight;
                if (best.level + 1 < tree.levels) push(followed(best.node, shortest), best.weight, MATCH, n, best.level + 1);
            }
        }
    }

    void by_recency(Tree& tree, int shortest) {
        const int longest = trie.depth - 1;
        std::vector<std::pair<Id, int>> level, below;
        for (Id match = followed(found(), shortest); match != NONE; match = followed(trie.nodes[match].suffix, shortest)) {
            const int breadth = 1 + (BREADTH - 1) * (longest - trie.nodes[match].length) / std::max(longest - 1, 1);
            level.assign(1, {match, -1});
            for (int number = 0; number < tree.levels; number++) {
                below.clear();
                for (const auto& [node, under] : level) {
                    int left = std::max(breadth - number, 1);
                    for (Id child = trie.nodes[node].newest; child != NONE && left > 0; child = trie.nodes[child].older, left--) {
                        if (!tree.has_room()) return;
                        const int n = tree.place(trie.nodes[child].token, under);
                        const Id next = followed(child, shortest);
                        if (next != NONE) below.push_back({next, n});
                    }
                }
                level.swap(below);
            }
        }
    }

  private:
    std::vector<Candidate> candidates;  // a heap, a member so that its memory is reused

    void remember(int32_t token) {
        if (int(recent.size()) == trie.depth) recent.erase(recent.begin());
        recent.push_back(token);
    }

    void place(Id node) {
        at = node;
        generation = trie.nodes[node].generation;
        grown = trie.grown;
        epoch = trie.epoch;
    }
};

}  // namespace

extern "C" {

int outrider_trie_version() { return 3; }

void* outrider_trie_new(int depth, uint64_t capacity) { return new Trie(depth, capacity); }
void outrider_trie_free(void* trie) { delete static_cast<Trie*>(trie); }
void outrider_trie_clear(void* trie) { static_cast<Trie*>(trie)->clear(); }
uint64_t outrider_trie_size(void* trie) { return static_cast<Trie*>(trie)->used; }
uint64_t outrider_trie_bytes(void* trie) { return static_cast<Trie*>(trie)->bytes(); }

void* outrider_cursor_new(void* trie) { return new Cursor(*static_cast<Trie*>(trie)); }
void outrider_cursor_free(void* cursor) { delete static_cast<Cursor*>(cursor); }

void outrider_cursor_append(void* cursor, const int32_t* tokens, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) static_cast<Cursor*>(cursor)->append(tokens[i]);
}

void outrider_cursor_follow(void* cursor, const int32_t* tokens, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) static_cast<Cursor*>(cursor)->follow(tokens[i]);
}

int outrider_cursor_match(void* cursor) {
    Cursor& own = *static_cast<Cursor*>(cursor);
    return own.trie.nodes[own.found()].length;
}

int outrider_cursor_followed(void* cursor) {
    Cursor& own = *static_cast<Cursor*>(cursor);
    const Id node = own.followed(own.found(), 1);
    return node == NONE ? 0 : own.trie.nodes[node].length;
}

// Room for `most` tokens; returns how many were written.
int outrider_cursor_chain(void* cursor, int most, int shortest, int32_t* tokens) {
    return static_cast<Cursor*>(cursor)->chain(most, shortest, tokens);
}

// Room for `budget` tokens, parents and shares, these only by frequency; returns how many were written.
int outrider_cursor_tree(
    void* cursor, int by_frequency, int budget, int levels, int shortest, int32_t* tokens, int32_t* parents, double* shares) {
    Cursor& own = *static_cast<Cursor*>(cursor);
    Tree tree{budget, levels, tokens, parents, shares, 0};
    if (by_frequency) own.by_frequency(tree, shortest);
    else own.by_recency(tree, shortest);
    return tree.size;
}

}  // extern "C"
