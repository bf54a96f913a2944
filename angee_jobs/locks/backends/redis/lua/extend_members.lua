-- Let the shared and placed leases that are still held by their owner end later; never sooner.
--
-- KEYS  the index, for each hold the gate and the members of its key
-- ARGV  for each hold: name, owner, ttl in microseconds, 1 if it is shared, what stands before an id in its key
-- Returns a string with 1 for each hold that was extended, and 0 for the others.

local answer = {}
for i = 1, (#KEYS - 1) / 2 do
    local name, owner, ttl, shared, before = unpack(ARGV, 5 * i - 4, 5 * i)
    local gate, members = KEYS[2 * i], KEYS[2 * i + 1]
    local id, hold = find(gate, members, before, owner, shared == '1')
    if id then
        local expires = math.max(ends(hold), now + ttl)
        -- The ZREM first: see extend.lua.
        redis.pcall('ZREM', KEYS[1], name .. '\1' .. id)
        redis.pcall('ZADD', KEYS[1], string.format('%.0f', expires), name .. '\1' .. id)
        redis.call('ZADD', members, string.format('%.0f', expires), id)
        redis.call('SET', before .. id, string.format('%016.0f', expires) .. string.sub(hold, 17))
        close(gate, KEYS[1], members, name)
        answer[i] = '1'
    else
        answer[i] = '0'
    end
end
return table.concat(answer)
