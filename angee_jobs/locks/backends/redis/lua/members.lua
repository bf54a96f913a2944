-- What the scripts about shared and placed holds begin with.
--
-- Such a hold is stored as an exclusive one is, below the name of its key, \1 and its id: its place, or the owner if it
-- is shared. `members:<name>` has the ids by the ends of the holds. The string of the key itself is the gate: its owner
-- is dashes, and it ends with the last of the members, so that an exclusive hold is refused by that one string.

local GATE = string.rep('-', 64)
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function ends(hold)
    return hold and #hold >= 112 and tonumber(string.sub(hold, 1, 16)) or 0
end

local function owner_of(hold)
    return string.sub(hold, 49, 112)
end

-- By key of members, the ids of places by owner. Read once: a batch that renews 1000 places of one key would read each
-- of them 1000 times.
local placed = {}

-- The id and the string of the live hold of `owner`, or nil. Without the gate the members are over: it was deleted by
-- hand, and an exclusive hold may have been granted since.
local function find(gate, members, before, owner, shared)
    local key = redis.call('GET', gate)
    if ends(key) <= now or owner_of(key) ~= GATE then
        return
    end
    local id = owner
    if not shared then
        if not placed[members] then
            placed[members] = {}
            for _, each in ipairs(redis.call('ZRANGEBYSCORE', members, string.format('(%.0f', now), '+inf')) do
                local hold = #each < 64 and redis.call('GET', before .. each)
                if hold then
                    placed[members][owner_of(hold)] = each
                end
            end
        end
        id = placed[members][owner]
    end
    local hold = id and redis.call('GET', before .. id)
    if ends(hold) > now and owner_of(hold) == owner then
        return id, hold
    end
end

-- Let the gate end with the last member, or go with it; it stays, over, while it says which word (of KEYS) stands. With
-- pcall: the index only makes lists fast.
local function close(gate, index, members, name, word)
    local hold = redis.call('GET', gate)
    if not hold or owner_of(hold) ~= GATE then
        return
    end
    local last = redis.call('ZREVRANGE', members, 0, 0, 'WITHSCORES')
    local expires = tonumber(last[2] or 0)
    redis.pcall('ZREM', index, name)
    if expires <= now and word and redis.call('EXISTS', word) == 1 then
        expires = now
    end
    if expires >= now then
        redis.pcall('ZADD', index, string.format('%.0f', expires), name)
        redis.call('SET', gate, string.format('%016.0f', expires) .. string.sub(hold, 17))
    else
        redis.call('DEL', gate)
    end
end

-- End a member that has not been reaped.
local function remove(index, members, before, name, id)
    redis.call('DEL', before .. id)
    redis.pcall('ZREM', index, name .. '\1' .. id)
    redis.call('ZREM', members, id)
end

